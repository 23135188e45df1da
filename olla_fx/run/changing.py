"""Decides which numbers and sizes a step is captured with as symbols, because they change from call to call.

A call comes that no plan fits, because of Python numbers or sizes of inputs alone. The step is captured once
more, with these as symbols, and compared with that plan's (:mod:`olla_fx.capture.symbols.comparison`). If it
is the same step, the new plans serve all their values: a number becomes an input of the graph, sizes make a
family (:mod:`olla_fx.run.families`). If not, it is remembered what must stay a constant, and each value is a
kind of call.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from olla_fx.capture import CapturedStep, Role, TensorSpec
from olla_fx.capture.types import OutputAlias, SymbolRequest
from olla_fx.capture.varying import TangentsSeen, VaryingSizes, sizes_as_they_are, varying_sizes
from olla_fx.compiled import CompiledStep
from olla_fx.errors import CaptureError, NumberNotLateError
from olla_fx.guards import LateBinding, NumberSlot, Prologue
from olla_fx.guards.numbers import can_be_late
from olla_fx.run.answers import Answers
from olla_fx.run.calls import structure_of
from olla_fx.run.plan_cache import Strides
from olla_fx.torch_compat import pytree

logger = logging.getLogger(__name__)

MOST_FAMILIES = 8
"""Families that are tried for calls of one structure."""

Dimensions = frozenset[tuple[int, int]]
"""Dimensions of inputs: the tensor's index and the dimension's."""


Tangents = tuple[tuple[Sequence[int], Sequence[int]], ...]
"""Shape and strides of the gradients that come back to a step's outputs."""


@dataclass(frozen=True, eq=False)
class EarlierStep:
    """A step that has a plan, which others may be like but for numbers and sizes.

    Attributes:
        step: compiled.
        prologue: tells what model and settings differ in.
        key: what tells its call apart.
        kind: the mode of its call, and the modules' flags.
        specs: the tensors of its call; for a family, of the call for which it was captured.
        answers: what was answered about the inputs of its call.
        varying: the sizes of a family; None for a plan of one size.
        tangent_strides: the layouts in which gradients came to its outputs, if others than planned.
    """

    step: CompiledStep
    prologue: Prologue
    key: Hashable
    kind: Hashable
    specs: tuple[TensorSpec, ...]
    answers: Answers
    varying: VaryingSizes | None = None
    tangent_strides: Strides = ()

    @property
    def captured(self) -> CapturedStep:
        """As it was captured."""
        return self.step.captured

    def tangents(self) -> Tangents:
        """Return shape and strides of the gradients that come back to its outputs."""
        specs = [item.spec for item in self.captured.inputs if item.role is Role.TANGENT]
        known = [spec for spec in specs if spec is not None]
        strides = self.tangent_strides or [spec.stride for spec in known]
        return tuple((spec.shape, stride) for spec, stride in zip(known, strides, strict=True))


@dataclass(frozen=True, eq=False)
class ChangedCall:
    """A call that differs from that of an earlier step in numbers and sizes alone.

    Attributes:
        earlier: the step.
        specs: the tensors of the call.
        numbers: those that are to be inputs of the graph from now on, as they were.
        constants: other numbers that differ, by name, as they are.
        later: the names of constants that may be inputs of the graph once there is a plan to compare with.
        changed: the dimensions that differ.
        varying: the sizes that are to be symbols; None if none are.
        counts: True if numbers that inputs answer to Python's questions are to be symbols, too.
        sizes: those of the earlier step.
    """

    earlier: EarlierStep
    specs: tuple[TensorSpec, ...]
    numbers: Mapping[NumberSlot, float]
    constants: Mapping[str, object] = field(default_factory=dict)
    later: frozenset[str] = frozenset()
    changed: Dimensions = frozenset()
    varying: VaryingSizes | None = None
    counts: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def changes(self) -> tuple[tuple[str, object], ...]:
        """What the model differs in from the earlier step, whatever numbers that may be inputs are."""
        late = ((slot.name, "another number") for slot in self.numbers)
        constants = (
            (name, f"another {type(number).__name__}" if name in self.later else repr(number))
            for name, number in self.constants.items()
        )
        return (*late, *constants)

    def is_refused_for_numbers(self, error: CaptureError) -> bool:
        """Return True if it was for the numbers that the step could not be captured with symbols."""
        return bool(self.numbers) and (self.varying is None or isinstance(error, NumberNotLateError))

    def with_constants(self, *, later: bool = False) -> ChangedCall:
        """Return the same with no further numbers as inputs of the graph.

        Args:
            later: True if they may be inputs once there is a plan to compare with.
        """
        constants = {slot.name: slot.read() for slot in self.numbers}
        names = self.later | (constants.keys() if later else frozenset())
        return replace(self, numbers={}, constants={**self.constants, **constants}, later=names)

    def symbols(self, tangents: Tangents) -> SymbolRequest:
        """Return what to capture the step with.

        Args:
            tangents: the gradients that come to the outputs of such calls; empty for the earlier step's.
        """
        captured = self.earlier.captured
        seen = None
        if self.varying is not None:
            has_views = any(isinstance(leaf, OutputAlias) for _, leaf in captured.outputs.leaves)
            seen = TangentsSeen(self.sizes, tangents or self.earlier.tangents(), has_views)
        return SymbolRequest(
            (*captured.reads.late.slots, *self.numbers),
            self.varying,
            self.counts,
            seen,
            None if self.constants else captured,
            {slot.name: number for slot, number in self.numbers.items()},
            self.sizes,
            False,
            tuple(question.asker for question in captured.questions if question.asker is not None),
        )


class Changing:
    """What a module knows of the numbers and sizes that change."""

    def __init__(self) -> None:
        """Begin without knowing any."""
        self._constant: set[str] = set()
        self._constant_together: set[frozenset[str]] = set()
        self._tried: dict[Hashable, int] = {}
        self._fixed: dict[Hashable, set[tuple[int, int]]] = {}
        self._fixed_counts: set[Hashable] = set()
        self._counted: set[Hashable] = set()
        self._seen: dict[Hashable, list[tuple[TensorSpec, ...]]] = {}

    def find(
        self,
        key: Hashable,
        kind: Hashable,
        inputs: tuple[Any, ...],
        examples: Sequence[torch.Tensor],
        earlier: Sequence[EarlierStep],
        *,
        sizes_vary: bool,
    ) -> ChangedCall | None:
        """Return what tells a call from an earlier one, if it is sizes and numbers that may be symbols.

        Args:
            key: what tells the call apart.
            kind: its mode, and the modules' flags.
            inputs: of the call.
            examples: the tensors among these.
            earlier: steps that have plans, the best ones to compare with first.
            sizes_vary: False if sizes are to stay numbers.
        """
        structure, specs = structure_of(key), tensor_specs(specs_of(inputs))
        alike = [one for one in earlier if one.kind == kind and structure_of(one.key) == structure]
        for one in alike:
            call = self._sizes_changed(one, specs, (structure, kind), sizes_vary=sizes_vary)
            if call is not None:
                call = self._counts_changed(call, examples, (structure, kind), sizes_vary=sizes_vary)
            if call is None:
                continue
            call = self._numbers_changed(call, alike)
            if call is not None:
                return call
        return None

    def _sizes_changed(
        self, one: EarlierStep, specs: tuple[TensorSpec, ...], alike: Hashable, *, sizes_vary: bool
    ) -> ChangedCall | None:
        """Return a call without its numbers; None if sizes differ that must stay numbers."""
        call = ChangedCall(one, specs, {})
        present = [(spec.shape, spec.stride) for spec in specs]
        has_tried = self._tried.get(alike, 0) >= MOST_FAMILIES
        if one.varying is not None and not has_tried:
            sizes = one.varying.read(present)
            if sizes is not None:
                return replace(call, varying=replace(one.varying, hints=sizes), sizes=one.varying.hints)
        changed = _changed(one.specs, specs)
        if not changed:
            return call
        fixed = self._fixed.setdefault(alike, set())
        if not sizes_vary or changed & fixed or has_tried:
            return None
        varying = varying_sizes([one.specs, *self._seen.get(alike, ()), specs])
        was = None if varying is None else varying.read([(spec.shape, spec.stride) for spec in one.specs])
        if varying is None or was is None:
            fixed |= changed
            return None
        return replace(call, changed=changed, varying=varying, sizes=was)

    def _counts_changed(
        self, call: ChangedCall, examples: Sequence[torch.Tensor], alike: Hashable, *, sizes_vary: bool
    ) -> ChangedCall | None:
        """Return a call with what its inputs answer; None if they give another answer that is no count."""
        has_numbers = call.earlier.answers.has_numbers
        may_count = sizes_vary and has_numbers and alike not in self._fixed_counts
        if call.varying is not None:
            return replace(call, counts=may_count) if may_count or call.varying.hints else None
        other = call.earlier.answers.other(examples)
        if other is None:
            return call
        has_tried = self._tried.get(alike, 0) >= MOST_FAMILIES
        if has_tried or not (may_count and other.is_number):
            return None
        return replace(call, varying=sizes_as_they_are(call.specs), counts=True)

    def _numbers_changed(self, call: ChangedCall, alike: Sequence[EarlierStep]) -> ChangedCall | None:
        """Return a call with the numbers that differ; None if something else does, or if it is no change."""
        with_sizes = call.varying is not None
        differing = call.earlier.prologue.changed_numbers(
            lambda slots: with_sizes or self._may_be_late(slots)
        )
        if differing is None:
            return None
        call = replace(call, numbers=differing)
        may_become_late = self._may_be_late(differing) and all(can_be_late(slot.read()) for slot in differing)
        may_be_late = (
            may_become_late
            and all(slot.may_be_late(number) for slot, number in differing.items())
            and not any(_takes_another_branch(one.captured.reads.late, differing) for one in alike)
        )
        if not may_be_late:
            return call.with_constants(later=may_become_late) if with_sizes else None
        return call if differing or with_sizes else None

    def refuse(self, call: ChangedCall, error: CaptureError) -> bool:
        """Note why a call could not be captured with symbols.

        Returns:
            True if its numbers cannot be inputs of the graph, whatever they are.
        """
        if not call.is_refused_for_numbers(error):
            if call.counts and not call.changed:
                self.refuse_counts(call, error)
                return False
            logger.info("sizes stay numbers: %s", error)
            self._fixed.setdefault(_alike(call), set()).update(call.changed)
            return False
        logger.info("%s: no inputs of the plan: %s", _names(call), error)
        if isinstance(error, NumberNotLateError):
            self._constant.update(error.names)
            if error.names or not error.is_lasting:
                return error.is_lasting
        self._constant_together.add(frozenset(slot.name for slot in call.numbers))
        return True

    def refuse_counts(self, call: ChangedCall, error: CaptureError) -> None:
        """Note why numbers that a call's inputs answer could be no symbols."""
        alike = _alike(call)
        logger.info("what inputs answer stays a number: %s", error)
        if alike not in self._counted:  # else it is this call's numbers that are special
            self._fixed_counts.add(alike)

    def may_be_without_counts(self, call: ChangedCall) -> bool:
        """Return True if a call that was refused with counts may do with sizes alone as symbols."""
        return call.counts and bool(call.changed) and _alike(call) not in self._counted

    def note_attempt(self, call: ChangedCall) -> None:
        """Note that a call is being captured with symbols."""
        if call.varying is not None:
            counts = ", and with answers of its inputs" if call.counts else ""
            logger.info("capturing the step with %d symbols as sizes%s", len(call.varying.hints), counts)
            self._tried[_alike(call)] = self._tried.get(_alike(call), 0) + 1

    def note_success(self, call: ChangedCall) -> None:
        """Note that a call was captured with symbols."""
        if call.numbers:
            logger.info("%s: inputs of the plan from now on", _names(call))
        if call.counts:
            self._counted.add(_alike(call))
        if call.varying is not None:
            seen = self._seen.setdefault(_alike(call), [])
            seen += (specs for specs in (call.earlier.specs, call.specs) if specs not in seen)

    def _may_be_late(self, slots: Iterable[NumberSlot]) -> bool:
        names = frozenset(slot.name for slot in slots)
        return not names & self._constant and names not in self._constant_together


def _alike(call: ChangedCall) -> Hashable:
    return structure_of(call.earlier.key), call.earlier.kind


def _names(call: ChangedCall) -> str:
    return ", ".join(slot.name for slot in call.numbers)


def _takes_another_branch(late: LateBinding, differing: Mapping[NumberSlot, float]) -> bool:
    """Return True if a plan with late-bound numbers suits those that were there, and not those of now."""
    before = {slot.name: number for slot, number in differing.items()}
    numbers = late.gather()
    old = [before.get(slot.name, number) for slot, number in zip(late.slots, numbers, strict=True)]
    return bool(late.slots) and late.suits(old) and not late.suits(numbers)


def specs_of(inputs: Any) -> Any:
    """Return a call's inputs with descriptions in the place of tensors: a batch is large."""
    return pytree.tree_map_only(torch.Tensor, TensorSpec.of, inputs)


def tensor_specs(example: Any) -> tuple[TensorSpec, ...]:
    """Return the descriptions of tensors among a call's inputs, flat."""
    return tuple(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, TensorSpec))


def _changed(earlier: Sequence[TensorSpec], present: Sequence[TensorSpec]) -> Dimensions:
    """Return the dimensions in which two calls differ."""
    return frozenset(
        (index, dim)
        for index, (old, new) in enumerate(zip(earlier, present, strict=True))
        for dim, (before, now) in enumerate(zip(old.shape, new.shape, strict=True))
        if before != now
    )
