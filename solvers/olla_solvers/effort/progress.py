"""Notes every improvement that a planner makes: the anytime curves of OLLA figures 10 and 12.

A planner makes a value small and proves a bound on it. A smaller value or a larger bound is noted, and
nothing else is kept, so the notes are two monotone curves over time. Noting changes nothing about the search.
An observer, if there is one, hears of each note at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from olla_solvers.problem import Bytes


@dataclass(frozen=True, slots=True)
class Improvement:
    """The state of a search after it found or proved something.

    Attributes:
        seconds: wall-clock time since the stage began.
        value_bytes: the best peak or height so far.
        bound_bytes: proven so far: no answer is smaller.
        method: the one that improved it.
    """

    seconds: float
    value_bytes: Bytes
    bound_bytes: Bytes
    method: str


Observer: TypeAlias = Callable[[Improvement], None]
"""Hears of each improvement while a search goes on, in its thread."""


class ProgressLog:
    """Collects the improvements of one run of a planner."""

    def __init__(
        self,
        start: float,
        bound_bytes: Bytes = 0,
        earlier: Sequence[Improvement] = (),
        observer: Observer | None = None,
    ) -> None:
        """Begin.

        Args:
            start: when the stage began, on the monotonic clock.
            bound_bytes: proven before anything was tried.
            earlier: notes to go on from.
            observer: hears of each note.
        """
        self._start = start
        self._bound_bytes = bound_bytes
        self._improvements = list(earlier)
        self._observer = observer

    def __getstate__(self) -> dict[str, Any]:
        """Leave the observer behind: it is the caller's, and a search may go on in another process."""
        return {**self.__dict__, "_observer": None}

    def note(self, value_bytes: Bytes, bound_bytes: Bytes, method: str) -> None:
        """Keep a value and a bound if either is better than before.

        Args:
            value_bytes: of the best answer that the caller knows.
            bound_bytes: the best bound that the caller knows.
            method: the one that found or proved it.
        """
        bound_bytes = max(bound_bytes, self._bound_bytes)
        if self._improvements:
            last = self._improvements[-1]
            value_bytes = min(value_bytes, last.value_bytes)
            bound_bytes = max(bound_bytes, last.bound_bytes)
            if (value_bytes, bound_bytes) == (last.value_bytes, last.bound_bytes):
                return
        improvement = Improvement(self.seconds(), value_bytes, bound_bytes, method)
        self._improvements.append(improvement)
        if self._observer is not None:
            self._observer(improvement)

    def seconds(self) -> float:
        """Return the wall-clock time since the stage began."""
        return time.monotonic() - self._start

    @property
    def improvements(self) -> tuple[Improvement, ...]:
        """The notes, in order."""
        return tuple(self._improvements)
