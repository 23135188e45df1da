"""Holds the results of planning: an order (`Schedule`), offsets (`Placement`), and both (`MemoryPlan`).

All byte counts follow one convention: ``peak_bytes``, ``lower_bound_bytes`` and ``buffer_bytes`` count
planned arrays and workspaces only; output arrays and static arrays stand apart.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from olla_solvers.effort.progress import Improvement
from olla_solvers.problem import Bytes, Offset, OperatorIndex, Timestep


class SolverStatus(enum.StrEnum):
    """The end of a solver's run."""

    NOT_RUN = "not_run"
    OPTIMAL = "optimal"
    TIME_LIMIT_WITH_INCUMBENT = "time_limit_with_incumbent"
    TIME_LIMIT_WITHOUT_INCUMBENT = "time_limit_without_incumbent"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


class SolverEffect(enum.StrEnum):
    """The effect of a solver's run on the plan."""

    NONE = "none"
    FOUND = "found"
    IMPROVED = "improved"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class SolverReport:
    """One solver run.

    Attributes:
        solver: ``cbc``, ``gurobi``, ``highs`` or ``none``.
        status: how it ended.
        effect: it found the answer alone, improved the start, or only confirmed it.
        objective_bytes: value of its incumbent, re-evaluated on the problem, if it has one.
        bound_bytes: the value that it proved no solution can beat, if any.
        variables: columns of the model it was given.
        constraints: rows of the model it was given.
        seconds: wall-clock time of the run.
        detail: the solver's own words, for the curious.
    """

    solver: str
    status: SolverStatus = SolverStatus.NOT_RUN
    effect: SolverEffect = SolverEffect.NONE
    objective_bytes: Bytes | None = None
    bound_bytes: Bytes | None = None
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0
    detail: str = ""

    @property
    def gap(self) -> float | None:
        """``(objective - bound) / objective``, or None if either is missing."""
        if self.objective_bytes is None or self.bound_bytes is None:
            return None
        if self.objective_bytes == 0:
            return 0.0
        return (self.objective_bytes - self.bound_bytes) / self.objective_bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """An execution order.

    Attributes:
        order: operator indices, first to last; a permutation.
        peak_bytes: largest resident set over the order.
        lower_bound_bytes: proven: no order can have a smaller peak.
        found_by: method that found the order (``captured``, ``greedy``, ``exact search``, ...).
        proved_by: method whose bound equals the peak, or None while there is a gap.
        solver: report of the integer program, ``NOT_RUN`` when none ran.
        seconds: wall-clock time of ordering.
        progress: every improvement of the peak or its bound.
    """

    order: tuple[OperatorIndex, ...]
    peak_bytes: Bytes
    lower_bound_bytes: Bytes
    found_by: str
    proved_by: str | None = None
    solver: SolverReport = field(default_factory=lambda: SolverReport("none"))
    seconds: float = 0.0
    progress: tuple[Improvement, ...] = ()

    @property
    def is_optimal(self) -> bool:
        """True if the peak equals its proven bound."""
        return self.peak_bytes == self.lower_bound_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A rectangle to place: bytes by time.

    Attributes:
        name: unique among the spans placed together.
        lower: first timestep of its lifetime.
        upper: end of its lifetime, exclusive.
        size_bytes: bytes it covers.
        alignment: its offset must be a multiple of this.
        offset: its offset if that is given beforehand, else None.
    """

    name: str
    lower: Timestep
    upper: Timestep
    size_bytes: Bytes
    alignment: int = 1
    offset: Offset | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets for a list of spans.

    Attributes:
        offsets: one for each span, in the spans' sequence.
        height_bytes: end of the topmost span.
        lower_bound_bytes: most bytes alive at one timestep: no placement is lower.
        found_by: method that found it.
        proved_by: the method that proves the height smallest, or None while there is a gap.
        solver: report of the integer program, ``NOT_RUN`` when none ran.
        seconds: wall-clock time of placing.
        progress: every improvement of the height or its bound.
    """

    offsets: tuple[Offset, ...]
    height_bytes: Bytes
    lower_bound_bytes: Bytes
    found_by: str
    proved_by: str | None = None
    solver: SolverReport = field(default_factory=lambda: SolverReport("none"))
    seconds: float = 0.0
    progress: tuple[Improvement, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Names the methods that found a plan's order and placement, and those that proved them.

    Attributes:
        order_found_by: see :attr:`Schedule.found_by`.
        order_proved_by: see :attr:`Schedule.proved_by`.
        order_solver: the integer program's report, if one ran for the order.
        place_found_by: see :attr:`Placement.found_by`.
        place_proved_by: see :attr:`Placement.proved_by`.
        place_solver: the integer program's report, if one ran for the placement.
    """

    order_found_by: str
    order_proved_by: str | None
    order_solver: SolverReport
    place_found_by: str
    place_proved_by: str | None
    place_solver: SolverReport


@dataclass(frozen=True)
class MemoryPlan:
    """An order and an address for every planned array and workspace, by name.

    Attributes:
        order: operator names, first to last.
        offsets: array name to its offset in the buffer, in bytes; planned arrays only.
        workspace_offsets: operator name to the offset of its workspace; those that have one.
        buffer_bytes: size of the buffer.
        peak_bytes: largest resident set.
        lower_bound_bytes: proven: no order has a smaller peak.
        provenance: the methods that found and proved it.
        timings: seconds a stage, by stage (``order``, ``place``, ...).
        progress: every improvement of ``order`` and ``place``, and its time.
        host_offsets: array name to its offset in the host's buffer, in bytes; arrays on the host only.
        host_bytes: size of that buffer.
    """

    order: tuple[str, ...]
    offsets: Mapping[str, Offset]
    workspace_offsets: Mapping[str, Offset]
    buffer_bytes: Bytes
    peak_bytes: Bytes
    lower_bound_bytes: Bytes
    provenance: Provenance
    timings: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, tuple[Improvement, ...]] = field(default_factory=dict)
    host_offsets: Mapping[str, Offset] = field(default_factory=dict)
    host_bytes: Bytes = 0

    @property
    def is_optimal(self) -> bool:
        """True if no order has a smaller peak, proven."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def fragmentation(self) -> float:
        """``(buffer - peak) / buffer``; 0 for an empty buffer."""
        return (self.buffer_bytes - self.peak_bytes) / self.buffer_bytes if self.buffer_bytes else 0.0
