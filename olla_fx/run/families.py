"""Keeps the families of a planned module: plans for all sizes of its inputs, from one captured graph each.

A call whose inputs are those of a plan but for some sizes is what a family is made for
(:mod:`olla_fx.family`). From then on a new size is placed, in milliseconds, and runs. What operators request
beside their arrays is recorded at the first sizes, and predicted from then on (:mod:`olla_fx.run.predicted`).
A family that cannot be made is not tried again for the same dimensions; sizes then stay numbers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from olla_fx.capture import Role, TensorSpec
from olla_fx.capture.varying import VaryingSizes, varying_sizes
from olla_fx.compile import CompiledStep, CompileRequest
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.errors import CaptureError
from olla_fx.family import Requirements, SizeFamily, Sizes, compile_family
from olla_fx.guards import Mismatch, Prologue
from olla_fx.run.executor import Executor
from olla_fx.run.plan_cache import CachedPlan, Strides
from olla_fx.run.predicted import Recordings, requirements
from olla_fx.run.recording import StepRecord
from olla_fx.torch_compat import pytree

logger = logging.getLogger(__name__)

MOST_SIZES = 256
"""Plans of one family that are kept."""

MOST_FAMILIES = 3
"""Families that are tried for calls of one structure."""


Tangents = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Shape and strides of the gradients that come back to a step's outputs."""


def structure_of(key: Hashable) -> Hashable:
    """Return what tells calls apart but for the sizes of their tensors."""
    if not isinstance(key, tuple):
        return key
    return tuple(
        (len(kind[0]), *kind[2:]) if isinstance(kind, tuple) and isinstance(kind[0], tuple) else kind
        for kind in key
    )


@dataclass(eq=False)
class FamilyPlans:
    """The plans of one family.

    Attributes:
        family: plans for any of its sizes.
        structure: of the calls that it is for.
        kind: their mode, and the modules' flags.
        prologue: gathers the inputs of all of them.
        request: for the step, without inputs.
        plans: by sizes; the one that was used last at the end.
        uses: the number of calls that it was found for.
        recordings: of its operators' requests.
    """

    family: SizeFamily
    structure: Hashable
    kind: Hashable
    prologue: Prologue
    request: CompileRequest
    plans: dict[Sizes, CachedPlan] = field(default_factory=dict)
    uses: int = 0

    def __post_init__(self) -> None:
        """Start without recordings."""
        self.recordings = Recordings(self.family.numbers)

    def take_record(self, other: CachedPlan) -> None:
        """Take over what was recorded of another plan, if its operators are the same."""
        record = other.executor.record
        tensors = [(spec.shape, spec.stride) for spec in _tensor_specs(other.example)]
        if record is None or record.is_predicted or not self.family.is_of_same_arrays(other.executor.step):
            return
        sizes = self.family.sizes_of_layouts(tensors) if other.kind == self.kind else None
        if sizes is not None:
            self.recordings.add(sizes, record)

    def at(self, sizes: Sizes, key: Hashable, example: Callable[[], Any]) -> CachedPlan:
        """Return the plan for some sizes, made now if there is none.

        Args:
            sizes: of the call.
            key: what tells the call apart.
            example: describes its inputs.
        """
        planned = self.plans.pop(sizes, None)
        if planned is None:
            planned = self._planned(sizes, key, example())
            while len(self.plans) >= MOST_SIZES:
                del self.plans[next(iter(self.plans))]
        self.plans[sizes] = planned
        return planned

    def _planned(self, sizes: Sizes, key: Hashable, example: Any) -> CachedPlan:
        last = next(reversed(self.plans.values()), None)
        gradients = None if last is None else last.executor.step.dataflow.gradients
        record = self.recordings.at(sizes, self.family.storage_bytes(sizes))
        executor = Executor(
            self.request,
            self._step(sizes, record, gradients),
            record,
            functools.partial(self._compile_again, sizes),
        )
        planned = CachedPlan(key, self.kind, executor, None, self.prologue, example)
        if last is not None:
            planned.suited = dict(last.suited)
            planned.saw_gradients, planned.clears_gradients = last.saw_gradients, last.clears_gradients
            planned.may_leave_gradients = last.may_leave_gradients
        return planned

    def _step(
        self, sizes: Sizes, record: StepRecord | None, gradients: GradientsInBuffer | None
    ) -> CompiledStep:
        needs = None if record is None else Requirements(*requirements(record, self.family.operators))
        return self.family.step_at(sizes, gradients, needs)

    def _compile_again(self, sizes: Sizes, record: StepRecord, gradients: GradientsInBuffer) -> CompiledStep:
        if not record.is_predicted and not record.unallocated:
            self.recordings.add(sizes, record)
        return self._step(sizes, record, gradients)


@dataclass(frozen=True, eq=False)
class FamilyBase:
    """The beginning of a family.

    Attributes:
        plan: of an earlier call.
        structure: of both calls.
        kind: their mode, and the modules' flags.
        present: the tensors of the new call.
        changed: the dimensions in which the two differ: the tensor's index and the dimension's.
        varying: the sizes that are to be symbols.
        sizes: those of the earlier call.
    """

    plan: CachedPlan
    structure: Hashable
    kind: Hashable
    present: tuple[TensorSpec, ...]
    changed: frozenset[tuple[int, int]]
    varying: VaryingSizes
    sizes: Sizes


class Families:
    """The families of a module, and what could be none."""

    def __init__(self) -> None:
        """Start without families."""
        self._families: list[FamilyPlans] = []
        self._tried: dict[Hashable, int] = {}
        self._refused: dict[Hashable, set[tuple[int, int]]] = {}
        self._founders: dict[Hashable, list[tuple[TensorSpec, ...]]] = {}
        self._tangents: dict[Hashable, Tangents] = {}

    def __len__(self) -> int:
        """Return how many plans they keep."""
        return sum(len(family.plans) for family in self._families)

    @property
    def count(self) -> int:
        """The number of families."""
        return len(self._families)

    def clear(self) -> None:
        """Forget all families, and what could be none."""
        self.__init__()  # type: ignore[misc]

    def fitting(
        self, key: Hashable, inputs: tuple[Any, ...], examples: Sequence[torch.Tensor]
    ) -> tuple[CachedPlan, list[Any]] | None:
        """Return the plan of a call and the values of its placeholders, if a family is for it.

        Args:
            key: what tells the call apart.
            inputs: of the call.
            examples: the tensors among these.

        Raises:
            StepInputError: if an input cannot be used.
        """
        if not self._families:
            return None
        structure = structure_of(key)
        for plans in reversed(self._families):
            if plans.structure != structure:
                continue
            sizes = plans.family.sizes_of(examples)
            if sizes is None:
                continue
            values = plans.prologue.run(examples)
            if not isinstance(values, Mismatch):
                planned = plans.at(sizes, key, lambda: _specs(inputs))
                plans.uses += 1
                planned.uses = plans.uses
                return planned, values
        return None

    def note_gradient_strides(self, plan: CachedPlan, strides: Strides) -> None:
        """Note in which layouts a backward received its gradients; a family for others is made anew."""
        family = next((family for family in self._families if plan.prologue is family.prologue), None)
        if family is None or strides == plan.executor.step.captured.tangent_strides:
            return
        self._tangents[family.structure, family.kind] = _tangents_of(plan, strides)
        self._families.remove(family)

    def base(
        self, key: Hashable, kind: Hashable, inputs: tuple[Any, ...], cached: Iterable[CachedPlan]
    ) -> FamilyBase | None:
        """Return what a family for a call would be made from: the plan of one that differs in sizes alone.

        Args:
            key: what tells the call apart.
            kind: its mode, and the modules' flags.
            inputs: of the call.
            cached: the module's plans, the one that was used last first.
        """
        structure = structure_of(key)
        if self._tried.get((structure, kind), 0) >= MOST_FAMILIES:
            return None
        present = _tensor_specs(_specs(inputs))
        refused = self._refused.setdefault((structure, kind), set())
        founders = self._founders.setdefault((structure, kind), [])
        for plan in cached:
            if plan.kind != kind or structure_of(plan.key) != structure or not _may_vary(plan):
                continue
            earlier = _tensor_specs(plan.example)
            changed = _changed(earlier, present)
            if not changed or changed & refused or not plan.prologue.fits():
                continue
            varying = varying_sizes([earlier, *founders, present])
            sizes = None if varying is None else varying.read([(spec.shape, spec.stride) for spec in earlier])
            if varying is None or sizes is None:
                refused |= changed
                continue
            return FamilyBase(plan, structure, kind, present, frozenset(changed), varying, sizes)
        return None

    def make(
        self,
        base: FamilyBase,
        request: CompileRequest,
        make_prologue: Callable[[CompiledStep], Prologue],
        strides: Strides,
    ) -> bool:
        """Make a family for a call.

        Args:
            base: what it is made from.
            request: the step, with the call's inputs.
            make_prologue: makes the guards of a step.
            strides: the layouts in which gradients came to the outputs of the base's plan, if others than
                planned.

        Returns:
            True if there is one now.
        """
        plan, alike = base.plan, (base.structure, base.kind)
        self._tried[alike] = self._tried.get(alike, 0) + 1
        logger.info("capturing the step with %d symbols as sizes", len(base.varying.hints))
        try:
            tangents = self._tangents.get(alike) or _tangents_of(plan, strides)
            family = compile_family(request, plan.executor.step, base.varying, base.sizes, tangents)
        except CaptureError as error:
            logger.info("sizes stay numbers: %s", error)
            self._refused[alike] |= base.changed
            return False
        self._founders[alike].append(base.present)
        bare = CompileRequest(replace(request.step, inputs=()))
        plans = FamilyPlans(family, base.structure, base.kind, make_prologue(family.step), bare)
        others = (known for one in self._families for known in one.plans.values())
        for other in (plan, *others):
            plans.take_record(other)
        self._families.append(plans)
        return True


def _may_vary(plan: CachedPlan) -> bool:
    """Return True if a family may be made from a plan: of one graph, for which Python asked no values."""
    captured = plan.executor.step.captured
    return plan.update is None and not captured.questions and not captured.reads.late.slots


def _tangents_of(plan: CachedPlan, strides: Strides) -> Tangents:
    """Return shape and strides of the gradients that come back to a plan's outputs."""
    inputs = plan.executor.step.captured.inputs
    specs = [item.spec for item in inputs if item.role is Role.TANGENT and item.spec is not None]
    return [
        (spec.shape, stride)
        for spec, stride in zip(specs, strides or [spec.stride for spec in specs], strict=True)
    ]


def _specs(inputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, TensorSpec.of, inputs)


def _tensor_specs(example: Any) -> tuple[TensorSpec, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, TensorSpec))


def _changed(earlier: Sequence[TensorSpec], present: Sequence[TensorSpec]) -> set[tuple[int, int]]:
    """Return the dimensions in which two calls differ: the tensor's index and the dimension's."""
    return {
        (index, dim)
        for index, (old, new) in enumerate(zip(earlier, present, strict=True))
        for dim, (before, now) in enumerate(zip(old.shape, new.shape, strict=True))
        if before != now
    }
