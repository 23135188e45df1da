"""The values that the stages of placement hand on: a task, a candidate, a result, and what they may cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from olla_solvers.effort.patience import Patience
from olla_solvers.effort.progress import Observer, ProgressLog
from olla_solvers.plan import Placement, SolverReport, Span
from olla_solvers.problem import Bytes, Offset
from olla_solvers.spans import height_bytes, max_live_bytes
from olla_solvers.spans.checks import check

DEFAULT_WORK = 150_000_000
"""Steps of the search if no time limit is given, about three seconds: then the result does not depend on the
machine unless that is very slow."""

FIRST_WORK = 40_000_000
"""Steps that any gap is worth: the search's part of the first second."""

LEAST_SECONDS = 0.05
LEAST_WORK = 1_000_000
"""Less is not worth a search."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost that a search may have.

    Attributes:
        deadline: on the monotonic clock.
        work: steps of the search; None for no limit. If this limit is met before the deadline, the result
            depends on the spans alone.
    """

    deadline: float
    work: int | None = None

    @classmethod
    def of(cls, seconds: float) -> Effort:
        """Return an effort of some seconds from now, without a limit on work."""
        return cls(time.monotonic() + seconds)

    def seconds(self) -> float:
        """Return the seconds left until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def part(self, share: float) -> Effort:
        """Return a share of what is left."""
        work = None if self.work is None else int(share * self.work)
        return Effort(time.monotonic() + share * self.seconds(), work)

    def less(self, work: int) -> Effort:
        """Return what is left after some steps of work."""
        return self if self.work is None else Effort(self.deadline, self.work - work)

    def at_most(self, work: int) -> Effort:
        """Return the effort with no more than some steps of work."""
        return Effort(self.deadline, work if self.work is None else min(work, self.work))

    def is_worth(self) -> bool:
        """Return True if enough is left for another search."""
        return self.seconds() > LEAST_SECONDS and (self.work is None or self.work > LEAST_WORK)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement of some spans.

    Attributes:
        offsets: one for each span.
        height_bytes: end of the topmost span.
        method: name of the method that found it.
    """

    offsets: tuple[Offset, ...]
    height_bytes: Bytes
    method: str

    @classmethod
    def of(cls, spans: Sequence[Span], offsets: Sequence[Offset], method: str) -> Candidate:
        """Measure the height of offsets."""
        return cls(tuple(offsets), height_bytes(spans, offsets), method)

    def or_lower(self, other: Candidate) -> Candidate:
        """Return the other candidate if it is lower than this one, else this one."""
        return other if other.height_bytes < self.height_bytes else self


def _keep(result: Result) -> None:
    """Do nothing with a result: it is returned in the end."""


@dataclass(frozen=True, slots=True)
class Task:
    """The spans to place, and the height to reach.

    Attributes:
        spans: checked rectangles.
        bound_bytes: most bytes alive at once.
        goal_bytes: the height that is low enough: the bound, or a capacity above it.
        effort: cost that searching may have.
        patience: the gap that is worth more than a first search; any if not given.
        solver: ``auto``, ``none``, or the name of the integer program's solver.
        is_capacity: True if heights above the goal are of no use.
        start: when placing began, on the monotonic clock.
        log: notes improvements.
        offer: takes each better result while a search goes on.
    """

    spans: Sequence[Span]
    bound_bytes: Bytes
    goal_bytes: Bytes
    effort: Effort
    solver: str = "none"
    is_capacity: bool = False
    patience: Patience = field(default_factory=lambda: Patience.until(math.inf))
    start: float = field(default_factory=time.monotonic)
    log: ProgressLog = field(default_factory=lambda: ProgressLog(time.monotonic()))
    offer: Callable[[Result], None] = _keep

    @classmethod
    def checked(
        cls,
        spans: Sequence[Span],
        *,
        solver: str,
        patience: Patience,
        capacity_bytes: Bytes | None = None,
        observer: Observer | None = None,
    ) -> Task:
        """Check spans and options, and state the task; arguments and errors as for ``place``.

        Args:
            spans: rectangles.
            solver: of the integer program.
            patience: how long to go on.
            capacity_bytes: a height that is low enough; None to go as low as possible.
            observer: hears of each lower placement in this process.
        """
        start = time.monotonic()
        check(spans)
        bound = max_live_bytes(spans)
        return cls(
            spans,
            bound,
            bound if capacity_bytes is None else max(bound, capacity_bytes),
            Effort(patience.deadline, None if patience.insists else DEFAULT_WORK),
            solver,
            capacity_bytes is not None,
            patience,
            start,
            ProgressLog(start, bound, observer=observer),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The lowest placement so far and the best bound.

    Attributes:
        candidate: the placement.
        bound_bytes: proven: no placement is lower.
        bound_by: name of the method that proved the bound.
        report: of the integer program.
    """

    candidate: Candidate
    bound_bytes: Bytes
    bound_by: str = "live bytes"
    report: SolverReport = field(default_factory=lambda: SolverReport("none"))

    def is_settled(self, task: Task) -> bool:
        """Return True if nothing is left to gain: the goal is reached or proven to be out of reach."""
        if task.is_capacity and self.bound_bytes > task.goal_bytes:
            return True
        return self.candidate.height_bytes <= max(task.goal_bytes, self.bound_bytes)

    def is_worth_more(self, task: Task) -> bool:
        """Return True if the gap is worth more than a first search."""
        return task.patience.is_worth(self.candidate.height_bytes, max(task.goal_bytes, self.bound_bytes))

    def placement(self, task: Task) -> Placement:
        """Return the result as users get it."""
        height, method = self.candidate.height_bytes, self.candidate.method
        task.log.note(height, min(self.bound_bytes, height), method)
        return Placement(
            offsets=self.candidate.offsets,
            height_bytes=height,
            lower_bound_bytes=self.bound_bytes,
            found_by=method,
            proved_by=self.bound_by if height == self.bound_bytes else None,
            solver=self.report,
            seconds=time.monotonic() - task.start,
            progress=task.log.improvements,
        )
