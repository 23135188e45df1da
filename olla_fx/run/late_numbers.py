"""Decides which Python numbers a step is captured with as inputs, because they change.

A call comes that a plan does not fit, because of one or more numbers alone. The step is captured once more,
with these numbers as inputs of its graph, and compared with that plan's. If it is the same step, the new
plan serves all values of theirs. If not, the step is captured with constants, and it is remembered which
numbers cannot be inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from olla_fx.capture.types import LateRequest
from olla_fx.compile import CompiledStep, CompileRequest, compile_step
from olla_fx.errors import CaptureError, NumberNotLateError
from olla_fx.guards import NumberSlot
from olla_fx.run.plan_cache import CachedPlan

logger = logging.getLogger(__name__)


class LateNumbers:
    """What a module knows of the numbers that its step reads."""

    def __init__(self) -> None:
        """Begin without knowing any."""
        self._constant: set[str] = set()
        self._refused: set[frozenset[str]] = set()

    def compile(
        self, request: CompileRequest, plans: Iterable[CachedPlan]
    ) -> tuple[CompiledStep, CompiledStep | None]:
        """Compile a step, with the numbers that changed as inputs if it can be.

        Args:
            request: what to compile.
            plans: for calls with such inputs, the one used last first; none of them fits.

        Raises:
            CaptureError: if the step cannot be captured.
        """
        late = self._late_request(plans)
        if late is None:
            return compile_step(request)
        names = [slot.name for slot in late.slots]
        try:
            compiled = compile_step(replace(request, step=replace(request.step, late=late)))
        except CaptureError as error:
            logger.info("%s stay constants of the plan: %s", ", ".join(names), error)
            self._refuse(frozenset(late.constants), error)
            return compile_step(request)
        logger.info("%s are inputs of the plan from now on", ", ".join(names))
        return compiled

    def can_be_late(self, plans: Iterable[CachedPlan]) -> bool:
        """Return True if numbers alone tell a call from some plan, and they may be inputs of the graph."""
        return self._late_request(plans) is not None

    def _late_request(self, plans: Iterable[CachedPlan]) -> LateRequest | None:
        for plan in plans:
            changed = plan.prologue.changed_numbers()
            if changed and self._is_allowed(changed):
                base = plan.executor.step.captured
                slots = (*base.reads.late.slots, *changed)
                return LateRequest(slots, base, {slot.name: number for slot, number in changed.items()})
        return None

    def _is_allowed(self, slots: Iterable[NumberSlot]) -> bool:
        names = frozenset(slot.name for slot in slots)
        return not names & self._constant and names not in self._refused

    def _refuse(self, changed: frozenset[str], error: CaptureError) -> None:
        if isinstance(error, NumberNotLateError) and error.names:
            self._constant.update(error.names)
        elif not isinstance(error, NumberNotLateError) or error.is_lasting:
            self._refused.add(changed)
