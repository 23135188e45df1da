"""A family of steps: one captured graph for all sizes of its inputs.

The step is captured once with sizes as symbols, and rewritten, ordered and emitted once, at the sizes of the
call that it was captured for (the hints). For other sizes the numbers in the code, the bytes of the arrays
and the layouts of inputs and outputs are computed by formulas, and the arrays are placed anew in the kept
order. Nothing is captured, ordered or emitted again.

Numbers of the user's may be symbols beside the sizes; these are inputs of the graph. A family is for one
combination of answers to what Python asks about its inputs' values.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from olla_fx.alignment import rounded
from olla_fx.capture import capture
from olla_fx.capture.types import CapturedFamily
from olla_fx.compile import plan_captured
from olla_fx.compiled import CompiledStep, CompileRequest
from olla_fx.dataflow import Dataflow, GradientsInBuffer, build_dataflow
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import LAYOUTS, Size, size_name
from olla_fx.guards import Question
from olla_fx.time_limit import TimeLimit
from olla_solvers.resizing import KeptOrder

SECONDS = 0.5
"""For ordering the operators: the order of the step that was captured before is there to begin from."""

COLLECTED_OBJECTS = 50_000
"""New objects after which garbage is looked for, while a step is traced with symbols."""

Sizes = tuple[int, ...]
"""The sizes of the inputs that vary, in one call, then the counts."""


@dataclass(frozen=True)
class Requirements:
    """What operators need at some sizes beside what the graph says.

    Attributes:
        workspace_bytes: of each operator.
        array_bytes: for arrays of which more was requested than their tensors have.
    """

    workspace_bytes: Sequence[int]
    array_bytes: Mapping[int, int]


class SizeFamily:
    """The steps of one captured graph at all sizes.

    Attributes:
        captured: the graph, at the hints.
        operators: their names.
        varying: the sizes.
    """

    def __init__(self, request: CompileRequest, step: CompiledStep, family: CapturedFamily) -> None:
        """Make the family of a step.

        Args:
            request: what was compiled.
            step: the result, at the hints.
            family: what was captured.

        Raises:
            CaptureError: if the bytes of an array are not known at other sizes.
        """
        self.captured = step.captured
        self.operators = tuple(operator.name for operator in step.dataflow.problem.operators)
        self.varying = family.varying
        self._request = request
        self._step = step
        self._family = family
        self._storage_bytes = _storage_bytes(step.dataflow)
        self._orders: dict[GradientsInBuffer, tuple[CompiledStep, KeptOrder]] = {}
        self._orders[step.dataflow.gradients] = step, KeptOrder(step.dataflow.problem, step.plan.order)
        if tuple(map(family.resolver(family.hints), self._storage_bytes)) != step.dataflow.storage_bytes:
            raise CaptureError("an array has other bytes than its formula says")

    @property
    def hints(self) -> Sizes:
        """The sizes for which it was captured."""
        return self._family.hints

    @property
    def has_counts(self) -> bool:
        """True if numbers that Python asks of the inputs are among the sizes, after those of the inputs."""
        return bool(self._family.counts)

    def counts_among(self, questions: Sequence[Question]) -> tuple[int, ...] | None:
        """Return the counts among the answers of the same step, captured with numbers; None without these."""
        return self._family.counts_among(questions)

    def is_for(self, sizes: Sizes) -> bool:
        """Return True if the sizes are such as tracing has assumed."""
        return all(self._family.conditions(*sizes))

    @property
    def step(self) -> CompiledStep:
        """The step at the sizes for which it was captured."""
        return self._step

    def numbers(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return all numbers of the graph that vary, at some sizes."""
        return self._family.formulas(*sizes)

    def storage_bytes(self, sizes: Sizes) -> list[int]:
        """Return the bytes of each array's storage at some sizes."""
        return list(map(self._family.resolver(sizes), self._storage_bytes))

    def questions(self, of_inputs: Sizes) -> tuple[Question, ...]:
        """Return what Python asks about the values of inputs of some sizes."""
        return self._family.questions_before(of_inputs)

    def is_of_same_arrays(self, step: CompiledStep) -> bool:
        """Return True if a step has the same operators and arrays but for their sizes."""
        own, other = self._step.dataflow, step.dataflow
        names = tuple(operator.name for operator in other.problem.operators)
        return names == self.operators and own.produced == other.produced

    def step_at(
        self, sizes: Sizes, gradients: GradientsInBuffer | None = None, needs: Requirements | None = None
    ) -> CompiledStep:
        """Return the step for some sizes, planned.

        Args:
            sizes: of the inputs, then the counts.
            gradients: those to have in the buffer; None for those of the step at the hints.
            needs: what operators need beside the graph; None if it is not known yet.
        """
        step, order = self._order_for(self._step.dataflow.gradients if gradients is None else gradients)
        dataflow = step.dataflow
        storage_bytes = self.storage_bytes(sizes)
        array_bytes = [rounded(size, dataflow.alignment_bytes) for size in storage_bytes]
        workspace_bytes: Sequence[int] = [0] * len(dataflow.operators)
        if needs is not None:
            workspace_bytes = needs.workspace_bytes
            for index, size in needs.array_bytes.items():
                array_bytes[index] = max(array_bytes[index], rounded(size, dataflow.alignment_bytes))
        problem, memory = order.plan(array_bytes, workspace_bytes)
        recorded = needs is not None
        numbers = self._family.formulas(*sizes)
        return CompiledStep(
            self.captured.at(sizes),
            replace(dataflow, problem=problem, storage_bytes=tuple(storage_bytes)),
            replace(step.plan, problem=problem, memory=memory, timings={}, workspaces_recorded=recorded),
            step.binding,
            step.emitted.with_numbers({size_name(Size(index)): value for index, value in enumerate(numbers)}),
        )

    def _order_for(self, gradients: GradientsInBuffer) -> tuple[CompiledStep, KeptOrder]:
        """Return the step at the hints with some gradients in the buffer, and its order."""
        if gradients not in self._orders:
            step = self._step
            dataflow = build_dataflow(step.dataflow.graph_module, step.dataflow.device, gradients)
            earlier = replace(step, dataflow=dataflow)
            request = replace(self._request, earlier=earlier, limit=TimeLimit(SECONDS))
            step = plan_captured(request, earlier.captured)
            self._orders[gradients] = step, KeptOrder(dataflow.problem, step.plan.order)
        return self._orders[gradients]


def compile_family(request: CompileRequest) -> SizeFamily:
    """Capture and plan a step for all sizes of its inputs.

    Args:
        request: for the step, with symbols for sizes and the inputs of the present call, whose sizes are the
            hints.

    Raises:
        CaptureError: if there is no such family: the model needs a size as a number, or tracing with symbols
            gave another graph.
    """
    with _rarely_collected():
        captured = capture(request.step)
    if captured.family is None:
        raise CaptureError("the step was captured with numbers")
    if request.start is not None:
        request = replace(request, limit=TimeLimit(SECONDS))
    return SizeFamily(request, plan_captured(request, captured), captured.family)


@contextlib.contextmanager
def _rarely_collected() -> Iterator[None]:
    """Look for garbage less often: symbols are many small objects, and looking takes a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _storage_bytes(dataflow: Dataflow) -> list[Any]:
    """Return the bytes of each array's storage, as numbers or formulas."""
    storage_bytes: list[Any] = list(dataflow.storage_bytes)
    position = {array.name: index for index, array in enumerate(dataflow.problem.arrays)}
    for node in dataflow.graph_module.graph.find_nodes(op="placeholder"):
        for layout in node.meta.get(LAYOUTS, ()):
            if layout is not None and node.name in position and storage_bytes[position[node.name]]:
                storage_bytes[position[node.name]] = layout.storage_bytes
    for node, produced in zip(dataflow.operators, dataflow.produced, strict=True):
        layouts = node.meta.get(LAYOUTS)
        if layouts is None and any(index is not None for index in produced):
            raise CaptureError(f"the layout of {node.name} at other sizes is not known")
        for index, layout in zip(produced, layouts or (), strict=False):
            if index is not None:
                storage_bytes[index] = layout.storage_bytes
    return storage_bytes
