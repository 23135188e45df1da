"""Plans steps within memory budgets over links to the host: by ours, by its parts, and by published planners.

``joint`` is :func:`olla_solvers.swapping.least_time.least_time_with_swaps`; ``recomputation`` and ``swap`` do
the one or the other alone. AutoSwap has its combined scores, and the DQN planner a time limit by the clock.
Published planners know one order, and get the first; ours get all. Extra time counts repetitions and stalls
in the simulator.

What is kept of each step and link: ``plans`` are peak and extra time of each planner for each of
:data:`SHARES` (None: not within it), ``proven`` the least extra time for each (None: proven impossible),
``least`` the smallest peak of each of ours within each of :data:`LIMITS`, and ``seconds`` of processor time
that each joint plan took.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from budget_tables import NEAR, in_markdown
from swapping_planners import SwappableStep

from olla_fx.deep_q import plan_by_learning
from olla_solvers.recomputation.least_time import least_time
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.swapping.least_time import least_time_of_swaps, least_time_with_swaps
from olla_solvers.swapping.transfers import Link

SHARES = (0.9, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Budgets, of the peak without repetitions or transfers."""

LIMITS = (0.0, 0.08)
"""Extra time."""

FINEST = 200
"""Budgets are searched in as many parts of the peak."""

AUTOSWAP = ("autoswap",)

MOST_OPERATORS = 3000
"""Of a step that the published planners get, and whose smallest peaks are searched: on larger ones AutoSwap
takes many minutes, and DQN ends no game."""

OURS = ("joint", "recomputation", "swap")

Point: TypeAlias = tuple[int, float] | None
"""Peak in bytes and extra time as a share of the step's; None if a budget is not met."""

Figures: TypeAlias = dict[str, Any]


def processor_seconds() -> float:
    """Return the seconds that this process and those that it has ended have spent."""
    return sum(os.times()[:4])


def by_swapping(
    problems: Sequence[RecomputationProblem],
    plain_bytes: int,
    links: Sequence[float],
    dqn_seconds: float,
) -> dict[str, Figures]:
    """Return all planners' plans of a step, by link.

    Args:
        problems: the step, in one order or several.
        plain_bytes: its peak without repetitions or transfers.
        links: GB/s each way.
        dqn_seconds: the time limit of a plan of the DQN planner, by the clock.
    """
    budgets = [int(share * plain_bytes) for share in SHARES]
    without_link: dict[tuple[str, int], Point] = {}
    figures = {}
    for rate in links:
        link = Link(rate * 1e9, rate * 1e9)
        ours = _Ours(problems, link, without_link)
        plans = {planner: [ours.plan(planner, budget) for budget in budgets] for planner in OURS}
        is_small = len(problems[0].order) <= MOST_OPERATORS
        if is_small:
            plans |= _by_published(problems[0], link, budgets, dqn_seconds)
        figures[f"{rate:g}"] = {
            "plans": plans,
            "proven": [ours.proven[budget] for budget in budgets],
            "least": {
                planner: [least_within(limit, plain_bytes, partial(ours.plan, planner)) for limit in LIMITS]
                for planner in (OURS if is_small else ())
            },
            "seconds": ours.seconds,
        }
    return figures


class _Ours:
    """Our plans of a step with a link; each budget is planned once.

    Attributes:
        proven: the least extra time within each budget that was planned jointly; None if it is impossible.
        seconds: that each joint plan took.
    """

    def __init__(
        self,
        problems: Sequence[RecomputationProblem],
        link: Link,
        without_link: dict[tuple[str, int], Point],
    ) -> None:
        """Begin.

        Args:
            problems: the step, in one order or several.
            link: which copies.
            without_link: plans that need none, which are the same for all links.
        """
        self.proven: dict[int, float | None] = {}
        self.seconds: list[float] = []
        self._problems, self._link = problems, link
        self._points: dict[tuple[str, int], Point] = {}
        self._without_link = without_link

    def plan(self, planner: str, budget_bytes: int) -> Point:
        """Return one of our planners' plan within a budget."""
        makers = {"joint": self._joint, "recomputation": self._recomputation, "swap": self._swap}
        points = self._without_link if planner == "recomputation" else self._points
        key = planner, budget_bytes
        if key not in points:
            points[key] = makers[planner](budget_bytes)
        return points[key]

    def _joint(self, budget_bytes: int) -> Point:
        began = processor_seconds()
        answer = least_time_with_swaps(self._problems, budget_bytes, self._link)
        self.seconds.append(processor_seconds() - began)
        bound = answer.bound
        self.proven[budget_bytes] = None if bound.is_impossible else self._share(bound.extra_seconds)
        return (answer.peak_bytes, self._share(answer.extra_seconds)) if answer.is_met else None

    def _recomputation(self, budget_bytes: int) -> Point:
        plan = least_time(self._problems, budget_bytes).recomputation
        return (plan.peak_bytes, self._share(plan.extra_seconds)) if plan.peak_bytes <= budget_bytes else None

    def _swap(self, budget_bytes: int) -> Point:
        answers = [least_time_of_swaps(problem, budget_bytes, self._link) for problem in self._problems]
        met = [(answer.extra_seconds, answer.peak_bytes) for answer in answers if answer.is_met]
        if not met:
            return None
        extra_seconds, peak_bytes = min(met)
        return peak_bytes, self._share(extra_seconds)

    def _share(self, seconds: float) -> float:
        return seconds / self._problems[0].step_seconds


def _by_published(
    problem: RecomputationProblem, link: Link, budgets: Sequence[int], dqn_seconds: float
) -> dict[str, list[Point]]:
    swappable = SwappableStep.of(problem)

    def share(point: tuple[int, float] | None) -> Point:
        return None if point is None else (point[0], point[1] / problem.step_seconds)

    def learned(budget_bytes: int) -> Point:
        answer = plan_by_learning(problem, budget_bytes, link, time_limit=dqn_seconds)
        return share((answer.plan.peak_bytes, answer.plan.extra_seconds)) if answer.is_met else None

    return {
        "AutoSwap": [share(swappable.plan(AUTOSWAP, budget, link)) for budget in budgets],
        "DQN": [learned(budget) for budget in budgets],
    }


def least_within(
    limit: float, plain_bytes: int, plan: Callable[[int], Point], parts: int = FINEST, near: float = NEAR
) -> int | None:
    """Return the smallest peak of plans within extra time, searched by halves; None if there is none.

    Args:
        limit: extra time as a share of the step's.
        plain_bytes: the largest budget.
        plan: plans within a budget.
        parts: into as many is the largest budget divided.
        near: extra time beyond the limit that is taken for none.
    """
    below, above, least = 0, parts, None
    while above - below > 1:
        middle = (below + above) // 2
        point = plan(middle * plain_bytes // parts)
        if point is not None and point[1] <= limit + near:
            above, least = middle, point[0]
        else:
            below = middle
    return least


def swapping_tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables of all steps' plans over links.

    Args:
        results: what is known of each step.
    """
    links = {link for known in results.values() for link in known.get("swapping", ())}
    by_link = {
        link: {name: known for name, known in results.items() if link in known.get("swapping", ())}
        for link in sorted(links, key=float)
    }
    parts = [_plans(link, known) for link, known in by_link.items()]
    return "\n\n".join([*parts, _least(results, list(by_link))]) if parts else ""


def _plans(link: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, known in results.items():
        figures = known["swapping"][link]
        for planner, points in figures["plans"].items():
            beside = figures["plans"]["joint"], figures["proven"]
            cells = [_cell(point, *others) for point, *others in zip(points, *beside, strict=True)]
            rows.append((_step(name), planner, *cells))
        proven = ["impossible" if bound is None else _percent(bound) for bound in figures["proven"]]
        rows.append((_step(name), "proven", *proven))
    return in_markdown(("step", f"over {link} GB/s", *(f"{share:g}" for share in SHARES)), rows)


def _cell(point: Point, joint: Point, bound: float | None) -> str:
    if point is None:
        return "" if bound is None else "-"
    is_faster = joint is None or point[1] + NEAR < joint[1]
    return _percent(point[1]) + (" (faster)" if is_faster else "")


def _least(results: Mapping[str, Mapping[str, Any]], links: Sequence[str]) -> str:
    columns = [(planner, limit) for limit in range(len(LIMITS)) for planner in OURS]
    header = ("step", "link, GB/s", *(f"{planner}, {LIMITS[limit]:.0%}" for planner, limit in columns), "s")
    rows = []
    for name, known in results.items():
        for link in links:
            figures = known.get("swapping", {}).get(link)
            if figures is None:
                continue
            least = figures["least"]
            cells = [least[planner][limit] if least else None for planner, limit in columns]
            shown = ["-" if size is None else f"{100 * size / known['peak_bytes']:.1f}" for size in cells]
            seconds = figures["seconds"]
            rows.append((_step(name), link, *shown, f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"))
    return in_markdown(header, rows)


def _step(name: str) -> str:
    return name.removesuffix(" none")


def _percent(share: float) -> str:
    return "-" if math.isinf(share) else f"{100 * share + 0.0:.2f}"
