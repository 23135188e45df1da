"""Decides which Python numbers a step is captured with as inputs, because they change.

A call comes that a plan does not fit, because of one or more numbers alone. The step is captured once more,
with these numbers as inputs of its graph, and compared with that plan's. If it is the same step, the new
plan serves all their values. If not, it is remembered which numbers cannot be inputs, and each value is a
kind of call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from olla_fx.capture.types import LateRequest
from olla_fx.compile import CompiledStep, CompileRequest, compile_step
from olla_fx.errors import CaptureError, NumberNotLateError
from olla_fx.guards import LateBinding, NumberSlot
from olla_fx.run.plan_cache import CachedPlan

logger = logging.getLogger(__name__)


class LateNumbers:
    """What a module knows of the numbers that its step reads."""

    def __init__(self) -> None:
        """Begin without knowing any."""
        self._constant: set[str] = set()
        self._refused: set[frozenset[str]] = set()

    def request(self, plans: Sequence[CachedPlan]) -> LateRequest | None:
        """Return what to capture if numbers alone tell a call from a plan, and may be inputs of the graph.

        Args:
            plans: for calls with such inputs, the one used last first; none of them fits.
        """
        for plan in plans:
            changed = plan.prologue.changed_numbers(self._may_be_late)
            if changed is None:
                continue
            base = plan.executor.step.captured
            if not any(
                _takes_another_branch(other.executor.step.captured.reads.late, changed) for other in plans
            ):
                slots = (*base.reads.late.slots, *changed)
                return LateRequest(
                    slots, base.fingerprint, {slot.name: number for slot, number in changed.items()}
                )
        return None

    def compile(
        self, request: CompileRequest, late: LateRequest, *, or_constants: bool
    ) -> tuple[CompiledStep, CompiledStep | None]:
        """Compile a step with numbers as inputs.

        Args:
            request: what to compile.
            late: the numbers.
            or_constants: compile the step for their present values if they cannot be inputs.

        Raises:
            CaptureError: if the step cannot be captured.
            NumberNotLateError: if numbers cannot be inputs, and nothing was compiled instead.
        """
        names = ", ".join(slot.name for slot in late.slots)
        try:
            compiled = compile_step(replace(request, step=replace(request.step, late=late)))
        except CaptureError as error:
            logger.info("%s: no inputs of the plan: %s", names, error)
            if self._refuse(frozenset(late.constants), error) and not or_constants:
                raise NumberNotLateError((), str(error)) from error
            return compile_step(request)
        logger.info("%s: inputs of the plan from now on", names)
        return compiled

    def _may_be_late(self, slots: Iterable[NumberSlot]) -> bool:
        names = frozenset(slot.name for slot in slots)
        return not names & self._constant and names not in self._refused

    def _refuse(self, changed: frozenset[str], error: CaptureError) -> bool:
        """Note why numbers cannot be inputs; return False if they may well be, for other values."""
        if isinstance(error, NumberNotLateError):
            self._constant.update(error.names)
            if error.names or not error.is_lasting:
                return error.is_lasting
        self._refused.add(changed)
        return True


def _takes_another_branch(late: LateBinding, changed: Mapping[NumberSlot, float]) -> bool:
    """Return True if a plan with late-bound numbers suits those that were there, and not those of now."""
    before = {slot.name: number for slot, number in changed.items()}
    numbers = late.gather()
    old = [before.get(slot.name, number) for slot, number in zip(late.slots, numbers, strict=True)]
    return bool(late.slots) and late.suits(old) and not late.suits(numbers)
