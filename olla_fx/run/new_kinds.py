"""Decides when a new kind of call is worth a plan.

Capturing and planning cost as much time as hundreds of steps, so a call of a new kind runs in eager until its
kind comes again. Kinds that come twice and never after would still be planned for nothing: while the plans
that were made so far have not been used often enough to pay, a kind must come twice as often for each of
these. So a loop that keeps bringing new kinds settles into eager after a few plans.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

USES_THAT_PAY = 8
"""Calls after which a plan counts as worth its making."""

MOST_KINDS = 256
"""Kinds of calls without a plan that are remembered; the one that was not seen for longest is forgotten."""

MOST_STATES = 4
"""States of model and settings that are remembered for each kind of call."""

CALLS_BEFORE_WARNING = 16
"""Calls in eager after which it is said why, if they are most of all calls since the first in eager."""

Changes = Sequence[tuple[str, object]]
"""What a model and the settings differ in from what the last plan assumes: what is said, and what is new."""


@dataclass(eq=False, slots=True)
class _State:
    """A state in which a kind of call was seen."""

    changes: Changes
    calls: int = 0
    is_refused: bool = False


@dataclass(eq=False)
class NewKinds:
    """The kinds of calls of one module that have no plan, and how often they came.

    Attributes:
        eager_calls: calls that ran in eager.
        unpaid: plans that were made for later calls and have not been used often enough to pay.
        plans_next: True if the next call without a plan is to have one at once.
    """

    eager_calls: int = 0
    unpaid: int = 0
    plans_next: bool = False
    _planned_calls: int = 0
    _has_warned: bool = False
    _states: collections.OrderedDict[Hashable, list[_State]] = field(default_factory=collections.OrderedDict)

    def is_worth_a_plan(self, kind: Hashable, changes: Changes) -> bool:
        """Count a call that no plan fits; return True if a plan is to be made for it now.

        Args:
            kind: what tells the call apart.
            changes: what model and settings differ in.
        """
        state = self._state(kind, changes)
        state.calls += 1
        at_once, self.plans_next = self.plans_next, False
        return not state.is_refused and (at_once or state.calls >= 2 << self.unpaid)

    def refuse(self, kind: Hashable, changes: Changes) -> None:
        """Note that such a call cannot be planned."""
        self._state(kind, changes).is_refused = True

    def forget(self) -> None:
        """Forget all kinds of calls, like their plans: the next one is planned at once."""
        self._states.clear()
        self.unpaid, self.plans_next = 0, True

    def note_plan(self, kind: Hashable) -> None:
        """Note that a plan was made for a kind of call."""
        self._states.pop(kind, None)
        self.unpaid += 1

    def note_use(self, uses: int) -> None:
        """Note that a plan was used so many times by now; the one that ``optimize`` made counts, too."""
        self._planned_calls += self.eager_calls > 0
        if uses == USES_THAT_PAY:
            self.unpaid = max(0, self.unpaid - 1)

    def note_eager_call(self) -> bool:
        """Note that a call runs in eager; return True if it is time, once, to say why."""
        self.eager_calls += 1
        is_time = (
            not self._has_warned
            and self.eager_calls >= CALLS_BEFORE_WARNING
            and self.eager_calls > self._planned_calls
        )
        self._has_warned |= is_time
        return is_time

    def _state(self, kind: Hashable, changes: Changes) -> _State:
        states = self._states.setdefault(kind, [])
        self._states.move_to_end(kind)
        while len(self._states) > MOST_KINDS:
            self._states.popitem(last=False)
        state = next((state for state in states if state.changes == changes), None)
        if state is None:
            state = _State(changes)
        else:
            states.remove(state)
        states.append(state)
        del states[:-MOST_STATES]
        return state
