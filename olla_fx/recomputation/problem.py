"""Says of a step's dataflow what may be recomputed, and puts what was chosen into its graph.

The planner (:mod:`olla_solvers.recomputation`) knows operators and arrays by their numbers.
:func:`recomputation_problem` tells it which operators make an array again, and when they may. Its answer
becomes a graph with repetitions by :func:`with_repetitions`, which is ordered and placed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx

from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.fx_graph import forward_backward_boundary, storages_of, written_arguments
from olla_fx.passes.repeatable import Repeatable
from olla_fx.passes.repetitions import OperatorRun, repeat_operators
from olla_fx.passes.rewrites.probes import Probe
from olla_solvers.problem import ArrayKind, OperatorIndex, Problem
from olla_solvers.recomputation.problem import ArrayIndex, Execution, RecomputationProblem, Seconds


@dataclass(frozen=True)
class RepeatedStep:
    """A step with repetitions.

    Attributes:
        dataflow: its graph after all passes.
        order: its operators' names in the planned sequence, from which ordering begins.
        runs: for each execution, the name of its operator; None if there is none.
    """

    dataflow: Dataflow
    order: tuple[str, ...]
    runs: tuple[str | None, ...]


def recomputation_problem(
    dataflow: Dataflow,
    order: Sequence[OperatorIndex],
    seconds: Sequence[Seconds],
    probe: Probe | None = None,
    moving_seconds: Callable[[int], Seconds] | None = None,
    again_seconds: Sequence[Seconds] = (),
) -> RecomputationProblem:
    """Say what of a step may run again.

    Args:
        dataflow: of a graph after passes with ``keep_phases``.
        order: an order of its operators.
        seconds: of each operator.
        probe: says whether kernels give equal bits; None if none may be used that need this.
        moving_seconds: of an operator that reads and writes so many bytes; None to take for every repetition
            what the first run takes.
        again_seconds: what a repetition of each operator is taken for; empty for what the first run takes.

    Returns:
        The problem; nothing of it may run again if the step has no backward. Its order is the given one, but
        for operators that need no memory (weight decay in place, say), which come as late as they may: what
        they overwrite can be read until then.
    """
    order = _with_writes_late(dataflow.problem, order)
    step = _Step(dataflow, order, probe)
    indices = range(len(dataflow.operators))
    makers = tuple(step.makers(array) for array in range(len(dataflow.problem.arrays)))
    used = {operator for group in makers for operator in group}
    must_precede = {operator: step.writers_behind[operator] for operator in sorted(used)}
    return RecomputationProblem(
        dataflow.problem,
        tuple(order),
        tuple(seconds),
        makers,
        tuple(map(step.phase, indices)),
        {operator: writers for operator, writers in must_precede.items() if writers},
        tuple(pair for operator in indices for pair in step.taken_over_by(operator)),
        tuple(
            step.again_seconds(operator, taken, moving_seconds)
            for operator, taken in enumerate(again_seconds or seconds)
        ),
    )


def with_repetitions(
    dataflow: Dataflow, executions: Sequence[Execution], probe: Probe | None = None
) -> RepeatedStep:
    """Put what was chosen into a step's graph.

    Args:
        dataflow: for which the problem was stated; not changed.
        executions: of the answer.
        probe: with which the problem was stated.

    Raises:
        CaptureError: if an execution is none that the problem allows.
    """
    names = [operator.name for operator in dataflow.problem.operators]
    runs = [
        OperatorRun(
            names[execution.operator],
            execution.copy,
            {names[source]: number for source, number in execution.sources if number},
        )
        for execution in executions
    ]
    repeated = repeat_operators(dataflow.graph_module, runs, dataflow.device, probe)
    return RepeatedStep(
        build_dataflow(repeated.graph_module, dataflow.device, dataflow.gradients),
        repeated.order,
        repeated.runs,
    )


_SCALARS_BYTES = 1024
"""A recorded workspace that is not larger holds numbers as tensors, such as the factor of weight decay."""


def _with_writes_late(problem: Problem, order: Sequence[OperatorIndex]) -> list[OperatorIndex]:
    """Return an order in which operators that need no memory come right before who waits for them."""
    needs_memory = {
        operator for operator, item in enumerate(problem.operators) if item.workspace_bytes > _SCALARS_BYTES
    }
    for array in problem.arrays:
        if array.kind is not ArrayKind.STATIC:
            needs_memory.update(array.consumers)
            needs_memory.add(cast(OperatorIndex, array.producer))
    waiting: dict[OperatorIndex, None] = {}
    late: list[OperatorIndex] = []
    for operator in order:
        if operator not in needs_memory:
            waiting[operator] = None
            continue
        pending, wanted = [operator], set()
        while pending:
            sources = [source for source in problem.predecessors[pending.pop()] if source in waiting]
            pending.extend(source for source in sources if source not in wanted)
            wanted.update(sources)
        late.extend(source for source in waiting if source in wanted)
        late.append(operator)
        waiting = {source: None for source in waiting if source not in wanted}
    return [*late, *waiting]


class _Step:
    """What is asked of a step in an order.

    Attributes:
        writers_behind: for operators that may run again, those that overwrite later what they read.
    """

    def __init__(self, dataflow: Dataflow, order: Sequence[OperatorIndex], probe: Probe | None) -> None:
        self._nodes = dataflow.operators
        self._produced = dataflow.produced
        self._arrays = dataflow.problem.arrays
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self._repeatable = Repeatable(dataflow.graph_module.graph, dataflow.device, probe)
        self._timestep = {operator: timestep for timestep, operator in enumerate(order)}
        boundary = self._repeatable.backward
        is_marker = boundary is not None and boundary.target is forward_backward_boundary
        self._boundary = (
            self._timestep[self._number[boundary]] if boundary is not None and is_marker else None
        )
        self._array = self._arrays_by_storage(dataflow)
        self._writers = self._writers_by_array()
        self.writers_behind: dict[OperatorIndex, tuple[OperatorIndex, ...]] = {}
        for operator, node in enumerate(self._nodes):
            writers = self._behind(node)
            if writers is not None:
                self.writers_behind[operator] = writers

    def phase(self, operator: OperatorIndex) -> int:
        """Return the phase in which an operator runs."""
        if self._boundary is not None:
            return int(self._timestep[operator] >= self._boundary)
        return self._repeatable.phase(self._nodes[operator])

    def _arrays_by_storage(self, dataflow: Dataflow) -> dict[int, ArrayIndex]:
        """Return the array of each storage that an operator makes."""
        arrays: dict[int, ArrayIndex] = {}
        for node, produced in zip(self._nodes, self._produced, strict=True):
            for key, array in zip(storages_of(node.meta.get("val")), produced, strict=False):
                if key is not None and array is not None:
                    arrays[key] = array
        return arrays

    def _arrays_of(self, node: fx.Node) -> set[ArrayIndex]:
        keys = storages_of(node.meta.get("val"))
        return {self._array[key] for key in keys if key is not None and key in self._array}

    def _writers_by_array(self) -> dict[ArrayIndex, list[OperatorIndex]]:
        """Return for arrays the operators that write to them later, in captured order."""
        writers: dict[ArrayIndex, list[OperatorIndex]] = {}
        for operator, node in enumerate(self._nodes):
            for array in {array for target in written_arguments(node) for array in self._arrays_of(target)}:
                writers.setdefault(array, []).append(operator)
        return writers

    def _behind(self, node: fx.Node) -> tuple[OperatorIndex, ...] | None:
        """Return the operators that a repetition must precede; None if an operator runs but once."""
        phase = self._repeatable.phase(node)
        if self.phase(self._number[node]) != phase or not self._repeatable.may_run_again(node):
            return None
        writers = self._repeatable.later_writers(node)
        numbers = tuple(sorted(self._number[writer] for writer in writers))
        are_later = all(self._repeatable.phase(writer) > phase for writer in writers)
        return numbers if are_later and all(self.phase(number) > phase for number in numbers) else None

    def makers(self, array: ArrayIndex) -> tuple[OperatorIndex, ...]:
        """Return the operators that make an array again; empty if it is kept."""
        producer = self._arrays[array].producer
        if self._arrays[array].kind is not ArrayKind.PLANNED or producer is None:
            return ()
        result = self._produced[producer].index(array)
        if producer not in self.writers_behind or not self._makes_again(producer, result):
            return ()
        writers = self._writers.get(array, [])
        if any(self._written(producer)) or any(self._written(writer) != {array} for writer in writers):
            return ()
        # What another phase writes over it is no part of making it.
        if any(self.phase(writer) != self.phase(producer) for writer in writers):
            return ()
        return (producer, *writers) if all(writer in self.writers_behind for writer in writers) else ()

    def _makes_again(self, operator: OperatorIndex, result: int) -> bool:
        return result == 0 or not self._repeatable.makes_first_alone(self._nodes[operator])

    def again_seconds(
        self, operator: OperatorIndex, seconds: Seconds, moving_seconds: Callable[[int], Seconds] | None
    ) -> Seconds:
        """Return the seconds of a repetition: none for a clamp that its batch norm's does, too."""
        node, made = self._nodes[operator], self._produced[operator][:1]
        if moving_seconds is not None and self._repeatable.makes_first_alone(node) and made[0] is not None:
            # It reads its input and writes its result, whatever the first run did beside.
            return min(seconds, moving_seconds(2 * self._arrays[made[0]].size_bytes))
        written = self._written(operator)
        if len(written) != 1:
            return seconds
        makers = self.makers(*written)
        clamps = len(makers) == 2 and self._repeatable.clamps_what_it_makes(
            self._nodes[makers[0]], self._nodes[operator]
        )
        return 0.0 if clamps else seconds

    def _written(self, operator: OperatorIndex) -> set[ArrayIndex]:
        targets = written_arguments(self._nodes[operator])
        arrays = {array for target in targets for array in self._arrays_of(target)}
        return {array for array in arrays if self._arrays[array].size_bytes}

    def taken_over_by(self, operator: OperatorIndex) -> list[tuple[ArrayIndex, ArrayIndex]]:
        """Return the arrays in whose memory an operator could make its result, each with the result."""
        node = self._nodes[operator]
        produced = [array for array in self._produced[operator] if array is not None]
        made = [array for array in produced if self._arrays[array].size_bytes]
        if len(made) != 1:
            return []
        return [
            (array, made[0])
            for argument in node.all_input_nodes
            for array in self._arrays_of(argument)
            if self._arrays[array].size_bytes == self._arrays[made[0]].size_bytes
            and self._repeatable.fits_over(node, argument)
        ]
