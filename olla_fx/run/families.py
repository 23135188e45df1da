"""Keeps the families of a planned module: plans for all sizes of its inputs, from one captured graph each.

A call whose inputs are those of a plan but for some sizes (:mod:`olla_fx.run.changing`) is what a family is
made for (:mod:`olla_fx.family`). From then on a new size is placed, in milliseconds, and runs. What operators
request beside their arrays is recorded at the first sizes, and predicted from then on
(:mod:`olla_fx.run.predicted`). Each answer that inputs give to what Python asks of them has its family.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from olla_fx.capture.types import SymbolRequest
from olla_fx.compiled import CompiledStep, CompileRequest
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.family import Requirements, SizeFamily, Sizes, compile_family
from olla_fx.guards import Mismatch, Prologue
from olla_fx.run.answers import Answer, Answers
from olla_fx.run.calls import structure_of
from olla_fx.run.changing import ChangedCall, EarlierStep, Tangents, specs_of, tensor_specs
from olla_fx.run.executor import Executor
from olla_fx.run.plan_cache import CachedPlan, Strides
from olla_fx.run.predicted import Recordings, requirements
from olla_fx.run.recording import StepRecord

MOST_SIZES = 256
"""Plans of one family that are kept."""


@dataclass(eq=False)
class FamilyPlans:
    """The plans of one family.

    Attributes:
        family: plans for any of its sizes.
        founder: the step at the sizes for which it was captured.
        request: for the step, without inputs.
        plans: by sizes; the one that was used last at the end.
        uses: the number of calls that it was found for.
        structure: of the calls that it is for.
        prologue: gathers the inputs of all of them.
        recordings: of its operators' requests.
    """

    family: SizeFamily
    founder: EarlierStep
    request: CompileRequest
    plans: dict[Sizes, CachedPlan] = field(default_factory=dict)
    uses: int = 0

    def __post_init__(self) -> None:
        """Start without recordings."""
        self.structure, self.prologue = structure_of(self.founder.key), self.founder.prologue
        self.recordings = Recordings(self.family.numbers)
        self._answers: dict[Sizes, Answers] = {}

    def answers(self, of_inputs: Sizes) -> Answers:
        """Return what was answered about inputs of some sizes."""
        known = self._answers.get(of_inputs)
        if known is None:
            known = self._answers[of_inputs] = Answers(self.family.questions(of_inputs))
            _forget_first(self._answers)
        return known

    def other_answer(self, examples: Sequence[torch.Tensor]) -> Answer | None:
        """Return the first answer of a call that is another; None without one, or for sizes of no plan.

        Args:
            examples: the tensors among its inputs.
        """
        of_inputs = self.family.varying.read([(tensor.shape, tensor.stride()) for tensor in examples])
        if of_inputs is None or not (self.family.has_counts or self.family.is_for(of_inputs)):
            return None
        return self.answers(of_inputs).other(examples)

    def sizes(
        self, of_inputs: Sizes, examples: Sequence[torch.Tensor], heard: dict[str, str]
    ) -> Sizes | None:
        """Return the sizes of a call, counts among them; None if the family is not for it.

        Args:
            of_inputs: the sizes of its inputs.
            examples: the tensors among these.
            heard: what they have answered other families; more is noted.
        """
        if not self.family.has_counts and not self.family.is_for(of_inputs):
            return None
        counts = self.answers(of_inputs).counts(examples, heard)
        if counts is None:
            return None
        sizes = (*of_inputs, *counts)
        return sizes if not counts or self.family.is_for(sizes) else None

    def take_record(self, other: CachedPlan) -> None:
        """Take over what was recorded of another plan, if its operators are the same."""
        record = other.executor.record
        tensors = [(spec.shape, spec.stride) for spec in tensor_specs(other.example)]
        if record is None or record.is_predicted or not self.family.is_of_same_arrays(other.executor.step):
            return
        of_inputs = self.family.varying.read(tensors) if other.kind == self.founder.kind else None
        counts = self.family.counts_among(other.executor.step.captured.questions)
        if of_inputs is not None and counts is not None and self.family.is_for((*of_inputs, *counts)):
            self.recordings.add((*of_inputs, *counts), record)

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
        self.plans[sizes] = planned
        _forget_first(self.plans)
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
        planned = CachedPlan(key, self.founder.kind, executor, None, self.prologue, example)
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


class Families:
    """The families of a module, and what could be none."""

    def __init__(self) -> None:
        """Start without families."""
        self.clear()

    def __len__(self) -> int:
        """Return how many plans they keep."""
        return sum(len(family.plans) for family in self._families)

    @property
    def count(self) -> int:
        """The number of families."""
        return len(self._families)

    def clear(self) -> None:
        """Forget all families, and what could be none."""
        self._families: list[FamilyPlans] = []
        self._tangents: dict[Hashable, Tangents] = {}

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
        fitting = self._for_inputs(structure_of(key), examples)
        # Only if the quick tests of all have failed, the exact ones.
        for test in (Prologue.check, Prologue.run):
            for plans, sizes in fitting:
                values = test(plans.prologue, examples)
                if values is not None and not isinstance(values, Mismatch):
                    planned = plans.at(sizes, key, lambda: specs_of(inputs))
                    plans.uses += 1
                    planned.uses = plans.uses
                    return planned, values
        return None

    def _for_inputs(
        self, structure: Hashable, examples: Sequence[torch.Tensor]
    ) -> list[tuple[FamilyPlans, Sizes]]:
        """Return the families for some inputs, each with their sizes; most share symbols and questions."""
        layouts = [(tensor.shape, tensor.stride()) for tensor in examples]
        read: dict[int, Sizes | None] = {}
        heard: dict[str, str] = {}
        fitting: list[tuple[FamilyPlans, Sizes]] = []
        for plans in reversed(self._families):
            if plans.structure == structure:
                varying = plans.family.varying
                if id(varying.tensors) not in read:
                    read[id(varying.tensors)] = varying.read(layouts)
                of_inputs = read[id(varying.tensors)]
                sizes = None if of_inputs is None else plans.sizes(of_inputs, examples, heard)
                if sizes is not None:
                    fitting.append((plans, sizes))
        return fitting

    def note_gradient_strides(self, plan: CachedPlan, strides: Strides) -> None:
        """Note in which layouts a backward received its gradients; a family for others is made anew."""
        family = next((family for family in self._families if plan.prologue is family.prologue), None)
        if family is None or strides == plan.executor.step.captured.tangent_strides:
            return
        self._tangents[family.structure, plan.kind] = step_of(plan, strides).tangents()
        self._families.remove(family)

    def other_answer(self, key: Hashable, kind: Hashable, examples: Sequence[torch.Tensor]) -> str | None:
        """Return what a call's inputs answer otherwise than a family for their sizes; see :meth:`heard`."""
        others = (plans.other_answer(examples) for plans in self._alike(structure_of(key), kind))
        return next((other.sentence for other in others if other is not None), None)

    def heard(
        self, key: Hashable, kind: Hashable, examples: Sequence[torch.Tensor], *, counts: bool
    ) -> frozenset[tuple[str, ...]]:
        """Return what a call's inputs answer otherwise than its families; calls that agree in it are alike.

        Args:
            key: what tells the call apart.
            kind: its mode, and the modules' flags.
            examples: the tensors among its inputs.
            counts: True if numbers are alike, since they may be symbols.
        """
        others = (plans.other_answer(examples) for plans in self._alike(structure_of(key), kind))
        return frozenset(other.kind(counts=counts) for other in others if other is not None)

    def steps(self, key: Hashable, kind: Hashable, examples: Sequence[torch.Tensor]) -> list[EarlierStep]:
        """Return the steps of which a call's may be another one, those first that answer as it does.

        Args:
            key: what tells the call apart.
            kind: its mode, and the modules' flags.
            examples: the tensors among its inputs.
        """
        alike = self._alike(structure_of(key), kind)
        alike.sort(key=lambda plans: plans.other_answer(examples) is not None)
        return [plans.founder for plans in alike]

    def _alike(self, structure: Hashable, kind: Hashable) -> list[FamilyPlans]:
        return [
            plans
            for plans in reversed(self._families)
            if (plans.structure, plans.founder.kind) == (structure, kind)
        ]

    def tangents(self, call: ChangedCall) -> Tangents:
        """Return the gradients that came to the outputs of such calls; empty if they came as planned."""
        return self._tangents.get((structure_of(call.earlier.key), call.earlier.kind), ())

    def make(
        self,
        key: Hashable,
        kind: Hashable,
        request: CompileRequest,
        make_prologue: Callable[[CompiledStep], Prologue],
        cached: Iterable[CachedPlan] = (),
        replaced: EarlierStep | None = None,
    ) -> CachedPlan:
        """Make a family for a call; return the plan for its sizes.

        Args:
            key: what tells the call apart.
            kind: its mode, and the modules' flags.
            request: the step, with the call's inputs and with symbols.
            make_prologue: makes the guards of a step.
            cached: plans whose operators may be the same.
            replaced: the founder of a family whose calls the new one serves, too.

        Raises:
            CaptureError: if there is no such family.
        """
        family = compile_family(request)
        prologue = make_prologue(family.step)
        answers, specs = Answers(family.captured.questions), specs_of(request.step.inputs)
        founder = EarlierStep(family.step, prologue, key, kind, tensor_specs(specs), answers, family.varying)
        bare = CompileRequest(replace(request.step, inputs=(), symbols=SymbolRequest()))
        plans = FamilyPlans(family, founder, bare)
        known = (planned for one in self._families for planned in one.plans.values())
        for other in (*cached, *known):
            plans.take_record(other)
        self._families = [one for one in self._families if one.founder is not replaced]
        self._families.append(plans)
        return plans.at(family.hints, key, lambda: specs)


def step_of(plan: CachedPlan, strides: Strides) -> EarlierStep:
    """Return a plan as a step that others may be like.

    Args:
        plan: of one size.
        strides: the layouts in which gradients came to its outputs, if others than planned.
    """
    step, specs = plan.executor.step, tensor_specs(plan.example)
    return EarlierStep(step, plan.prologue, plan.key, plan.kind, specs, plan.answers, tangent_strides=strides)


def _forget_first(of_sizes: dict[Sizes, Any]) -> None:
    """Keep no more than :data:`MOST_SIZES`."""
    while len(of_sizes) > MOST_SIZES:
        del of_sizes[next(iter(of_sizes))]
