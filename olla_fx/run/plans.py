"""Finds the plan of a call or has it made, or says that the model itself is to run it.

There is a plan for each kind of call (shapes and types of the inputs and, in the caller's own loop, whether
gradients are wanted and which modules train) and each answer that its inputs give to what Python asks of
them; if model or optimizer changed in a way that a plan depends on, the step is planned again, unless a plan
was made for that state before.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from olla_fx.capture import Mode, StepRequest
from olla_fx.capture.types import SymbolRequest
from olla_fx.capture.varying import all_sizes
from olla_fx.compiled import CompileRequest
from olla_fx.errors import CaptureError, NumberNotLateError, OllaError
from olla_fx.run.calls import Call, call_kind, structure_of, what_differs
from olla_fx.run.changing import ChangedCall, Changing, specs_of, tensor_specs
from olla_fx.run.families import Families, step_of
from olla_fx.run.making import PlanMaker
from olla_fx.run.new_kinds import NewKinds
from olla_fx.run.plan_cache import CachedPlan, PlanCache, Strides
from olla_fx.time_limit import TimeLimit
from olla_solvers.effort.freed_memory import return_freed_memory

logger = logging.getLogger(__name__)

Heard = tuple[frozenset[tuple[str, ...]], ...]
"""What the inputs of a call answer otherwise than those of the plans and families."""

_KEEP_IN_TENSORS = (
    "Keep what changes at every call in a tensor: an input or a buffer, which a plan reads anew"
)
_COMPUTE_WITH_TENSORS = (
    "Python asks the inputs for values there, and each answer needs a plan: compute with tensors instead (a "
    "mask, torch.where, tensor.max() without int() or item()), or give inputs that answer alike"
)

LITTLE_BYTES = 1 << 20
"""What a plan needs at least for its order to save anything worth its call on the stock allocator."""


@dataclass(frozen=True)
class NewCall:
    """A call that no plan fits.

    Attributes:
        call: its inputs.
        kind: its mode, and the modules' training flags.
        reason: why the plan of its kind that was used last does not fit; None if there is none of its kind.
        changed: what tells it from a planned one, if it is numbers and sizes that may be symbols.
    """

    call: Call
    kind: tuple[Mode, Hashable]
    reason: str | None
    changed: ChangedCall | None


class Plans:
    """The plans of one module.

    Attributes:
        cache: those that it has.
        current: what the last planned call ran.
        families: plans for all sizes of the inputs.
        new_kinds: the kinds of calls that have none.
        replans: the number of calls at which a step was planned again because model or optimizer changed.
        stock_runs: planned runs that took the stock allocator, since the buffer was taken.
        beside_runs: runs by the model itself for that reason.
    """

    current: CachedPlan

    def __init__(self, request: StepRequest) -> None:
        """Make the first plan.

        Args:
            request: what the module is for, with the example.
        """
        self._maker = PlanMaker(request)
        self.cache = PlanCache(request.options.cache_size_limit)
        self.families = Families()
        self.new_kinds = NewKinds()
        self._changing = Changing()
        # Counted here, since setting an attribute of an nn.Module takes an operator's time.
        self.replans = self.stock_runs = self.beside_runs = 0
        self._refusals: set[str] = set()
        # What all_save_little has found, and of which plans: it is asked at every call beside a waiting run.
        self._little: tuple[tuple[CachedPlan, int] | None, bool] = (None, False)
        call = Call.of(request.mode, request.inputs)
        self._maker.hold(call)
        kind = call_kind(request.model, request.mode, request.inputs)
        limit = TimeLimit(request.options.time_limit, plans=0)
        self.current = self._make_first(
            call, kind, CompileRequest(self._step_request(call, kind), limit=limit)
        )
        self._maker.forget_answers()

    def __len__(self) -> int:
        """Return how many plans there are."""
        return len(self.cache) + len(self.families)

    def saves_little(self, call: Call) -> bool:
        """Return True if a call's plan needs so little that beside another run it would save nothing.

        Args:
            call: any; one of a kind that has no plan saves what the last one did.
        """
        alike = (plan for plan in self._every_plan() if plan.key == call.key)
        return next(alike, self.current).plan.peak_bytes < LITTLE_BYTES

    def all_save_little(self) -> bool:
        """Return True if that is so of every call, so that its inputs need not be looked at."""
        plans = (self.current, len(self.cache))
        if self._little[0] != plans:
            self._little = plans, all(plan.plan.peak_bytes < LITTLE_BYTES for plan in self._every_plan())
        return self._little[1]

    def _every_plan(self) -> Iterator[CachedPlan]:
        return itertools.chain((self.current,), self.cache.newest_first())

    @property
    def falls_back(self) -> bool:
        """True if calls without a plan run in eager."""
        return self._maker.request.options.fallback == "eager"

    def of(self, call: Call, limit: TimeLimit) -> tuple[CachedPlan, list[Any]] | None:
        """Return the plan of a call and the values of its placeholders; None if it is to run in eager.

        Args:
            call: any.
            limit: for planning.

        Raises:
            OllaError: if it cannot be planned, and the options ask for that.
            StepInputError: if an input cannot be used with the plan that fits.
        """
        self._maker.hold(call)
        fitting = self.cache.fitting(call.key, call.tensors)
        if isinstance(fitting, tuple):
            return self._used(fitting)
        of_family = self.families.fitting(call.key, call.inputs, call.tensors)
        if of_family is not None:
            return self._used(of_family)
        kind = call_kind(self._maker.request.model, self._maker.request.mode, call.inputs)
        new = NewCall(call, kind, fitting.get(kind), self._changed(call, kind))
        return self._plan_new(new, limit) if self.falls_back else self._make_again(new, limit)

    @property
    def _sizes_are_fixed(self) -> bool:
        options = self._maker.request.options
        # What fits into a budget at some sizes says nothing about others.
        return (
            options.dynamic is False
            or options.cuda_graph
            or options.accumulation_steps > 1
            or options.memory_budget is not None
            or options.asks_to_swap
        )

    def _used(self, fitting: tuple[CachedPlan, list[Any]]) -> tuple[CachedPlan, list[Any]]:
        self.current, _ = fitting
        self.new_kinds.note_use(self.current.uses)
        return fitting

    def _changed(self, call: Call, kind: tuple[Mode, Hashable]) -> ChangedCall | None:
        """Return what tells a call from a planned one, if it is numbers and sizes that may be symbols."""
        steps = self.families.steps(call.key, kind, call.tensors)
        for plan in self.cache.newest_first():
            steps.append(step_of(plan, self.cache.gradient_strides(plan.key, plan.kind)))
        return self._changing.find(
            call.key, kind, call.inputs, call.tensors, steps, sizes_vary=not self._sizes_are_fixed
        )

    def _plan_new(self, new: NewCall, limit: TimeLimit) -> tuple[CachedPlan, list[Any]] | None:
        """Plan a call that no plan fits if that is worth it; return None if it is to run in eager."""
        # Calls that differ by sizes or numbers that may become symbols are one kind, whatever these are.
        changed, key = new.changed, new.call.key
        changes = self.current.prologue.changes() if changed is None else changed.changes
        may_count = changed is not None and changed.counts
        heard = (
            self.cache.heard(key, new.call.tensors, counts=may_count),
            self.families.heard(key, new.kind, new.call.tensors, counts=may_count),
        )
        is_of_one_size = changed is None or changed.varying is None
        new_kind = (key if is_of_one_size else structure_of(key), new.kind, heard)
        if new.reason is None and self.cache.gradient_strides(key, new.kind):
            self.new_kinds.plans_next = True  # a known kind, whose gradients come in another layout
        if self.new_kinds.is_worth_a_plan(new_kind, changes):
            try:
                planned = self._make_again(new, limit)
            except NumberNotLateError:
                logger.info("another value of a number is another kind of call")
            except OllaError as error:
                self.new_kinds.refuse(new_kind, changes)
                self.note_refusal(error)
            else:
                self.new_kinds.note_plan(new_kind)
                return planned
        logger.info("running in eager: %s", new.reason or "a new kind of call")
        if self.new_kinds.note_eager_call():
            warnings.warn(self._settled_text(new, heard), RuntimeWarning, stacklevel=7)
        return None

    def _settled_text(self, new: NewCall, heard: Heard) -> str:
        """Return what is said if most calls run in eager: what keeps changing, and what would help."""
        call = new.call
        why = new.reason or self.families.other_answer(call.key, new.kind, call.tensors)
        advice = _KEEP_IN_TENSORS
        if any(heard):
            advice = _COMPUTE_WITH_TENSORS
        elif why is None:
            why, advice = what_differs(call.key, self.current.key)
        model = type(self._maker.request.model).__name__
        return f"most calls of {model} run in eager, since they keep changing: {why}. {advice}"

    def note_refusal(self, error: OllaError) -> None:
        """Warn, once for each reason, that a kind of call runs in eager."""
        text = str(error)
        if text not in self._refusals:
            self._refusals.add(text)
            warnings.warn(
                f"a kind of call of {type(self._maker.request.model).__name__} cannot be planned and runs in "
                f"eager: {text} (fallback='raise' makes this an error)",
                RuntimeWarning,
                stacklevel=7,
            )

    def forget(self) -> None:
        """Forget all plans; the next call is planned."""
        self.cache.clear()
        self.families.clear()
        self.new_kinds.forget()
        self._changing = Changing()

    def _make_again(self, new: NewCall, limit: TimeLimit) -> tuple[CachedPlan, list[Any]]:
        """Make the plan of a later call; return it and the values of its placeholders."""
        call = new.call
        lost = self.cache.drop_lost()
        self.replans += lost
        logger.info("planning %s", f"again: {new.reason}" if new.reason else "for a new kind of call")
        planned = None if new.changed is None else self._make_with_symbols(new, new.changed, limit)
        if planned is None:
            # The order of another size or state is a good one to begin with.
            start = self.current.executor.step.plan.order
            request = self._later(self._step_request(call, new.kind), limit, start)
            make = self._make_first if new.changed is None else self._make
            self.current = make(call, new.kind, request)
            planned = self.current, self.current.prologue.gather(call.tensors)
        has_changed = new.reason is not None or (new.changed is not None and new.changed.changes != ())
        self.replans += has_changed and not lost
        return planned

    def _make_with_symbols(
        self, new: NewCall, changed: ChangedCall, limit: TimeLimit
    ) -> tuple[CachedPlan, list[Any]] | None:
        """Make a plan with symbols; return None if the step is to be captured with numbers.

        Raises:
            NumberNotLateError: if numbers cannot be inputs of the graph, and calls may run in eager.
        """
        self._changing.note_attempt(changed)
        try:
            planned = self._with_symbols(new, changed, limit)
        except CaptureError as error:
            if changed.varying is not None and changed.is_refused_for_numbers(error):
                # Or for sizes: these alone will tell.
                planned = self._make_with_symbols(new, changed.with_constants(), limit)
                if planned is not None:
                    self._changing.refuse(changed, error)
                return planned
            if self._changing.may_be_without_counts(changed):
                planned = self._make_with_symbols(new, replace(changed, counts=False), limit)
                if planned is not None:
                    self._changing.refuse_counts(changed, error)
                return planned
            if self._changing.refuse(changed, error) and self.falls_back:
                raise NumberNotLateError((), str(error)) from error
            return None
        self._changing.note_success(changed)
        return planned

    def _with_symbols(
        self, new: NewCall, changed: ChangedCall, limit: TimeLimit
    ) -> tuple[CachedPlan, list[Any]] | None:
        call, symbols = new.call, changed.symbols(self.families.tangents(changed))
        start = changed.earlier.step.plan.order
        step_request = replace(self._step_request(call, new.kind), symbols=symbols)
        if changed.varying is None:
            request = self._later(step_request, limit, start)
            self.current = self._make(call, new.kind, request)
            return self.current, self.current.prologue.gather(call.tensors)
        request = CompileRequest(replace(step_request, tangent_strides=()), limit=limit, start=start)
        # Of two families that differ in what was a constant only, the newer one serves both's calls.
        replaced = changed.earlier if changed.numbers else None
        cached = self.cache.newest_first()
        self.families.make(call.key, new.kind, request, self._maker.prologue_of, cached, replaced)
        return_freed_memory()
        fitting = self.families.fitting(call.key, call.inputs, call.tensors)
        if fitting is not None:
            self.current, _ = fitting
        return fitting

    def note_gradient_strides(self, planned: CachedPlan, strides: Strides) -> None:
        """Note in which layouts a backward received its gradients."""
        self.cache.note_gradient_strides(planned, strides)
        self.families.note_gradient_strides(planned, strides)

    def _make_first(self, call: Call, kind: tuple[Mode, Hashable], request: CompileRequest) -> CachedPlan:
        """Make the first plan of a kind of call: one for all sizes of its inputs if that is asked for."""
        options = self._maker.request.options
        varying = all_sizes(tensor_specs(specs_of(call.inputs))) if options.dynamic else None
        if varying is None or self._sizes_are_fixed:
            return self._make(call, kind, request)
        symbols = SymbolRequest(varying=varying, may_fix=True)
        try:
            dynamic = replace(request, step=replace(request.step, symbols=symbols))
            planned = self.families.make(call.key, kind, dynamic, self._maker.prologue_of)
        except CaptureError as error:
            logger.info("dynamic=True: sizes stay numbers until they vary: %s", error)
            return self._make(call, kind, request)
        return_freed_memory()
        return planned

    def _make(self, call: Call, kind: tuple[Mode, Hashable], request: CompileRequest) -> CachedPlan:
        step, update = self._maker.compiled(request)
        if self._maker.sees_new_writes(step):
            self.forget()
        planned = self._maker.plan_of(call, kind, step, update)
        self.cache.add(planned)
        return_freed_memory()
        return planned

    def _later(self, step: StepRequest, limit: TimeLimit, start: Sequence[str]) -> CompileRequest:
        """Return the request for a plan beside those that there are."""
        budgets = (plan.plan.memory_budget_bytes for plan in self._every_plan())
        earlier_bytes = max((size_bytes for size_bytes in budgets if size_bytes is not None), default=None)
        return CompileRequest(
            step,
            limit=limit,
            start=start,
            earlier_budget_bytes=earlier_bytes,
            may_exceed=self.falls_back,
        )

    def _step_request(self, call: Call, kind: tuple[Mode, Hashable]) -> StepRequest:
        return self._maker.step_request(call, kind, self.cache.gradient_strides(call.key, kind))
