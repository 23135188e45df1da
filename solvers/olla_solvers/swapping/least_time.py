"""The fastest sequence within a budget if each array may be kept, made again, or wait on the host.

What others plan as one large program falls into three parts. Which arrays wait on the host is chosen for the
order without repetitions, so that nothing stalls: greedily (:mod:`olla_solvers.swapping.choice`), where a
byte is worth what it is worth in the bound (:mod:`olla_solvers.swapping.bounds`), or less if its array is
made again for less; and, where arrays are few, by a program (:mod:`olla_solvers.swapping.choice_program`),
too. Then these arrays are elsewhere for so many operators of the order, and the fastest repetitions are
planned around that (:mod:`olla_solvers.recomputation.least_time`). They come in backward and give the link
more time, so the arrays to swap are chosen once more in the sequence that comes out, and scheduled in its
time. Only what is left beyond the budget then is waited for.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError, check_time
from olla_solvers.problem import Bytes
from olla_solvers.recomputation import least_time as repetitions
from olla_solvers.recomputation.bounds import LowerBound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import (
    ArrayIndex,
    Recomputation,
    RecomputationProblem,
    Seconds,
    Stay,
)
from olla_solvers.recomputation.residency import CLOSE, solver_for
from olla_solvers.swapping.bounds import BoundsWithHost
from olla_solvers.swapping.choice import choose
from olla_solvers.swapping.choice_program import choose_by_program
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.schedule import Swapped, places, within_budget, without_needless
from olla_solvers.swapping.simulate import Simulation
from olla_solvers.swapping.timeline import Timeline, timeline
from olla_solvers.swapping.transfers import Link, Transfer

LARGER = 1.05, 1.1, 1.2, 1.4, 1.7, 2.0
"""Budgets, as multiples, whose sequences are swapped in if the budget is met in no other way."""

MOST_TRIES = 60
"""Arrays, from the largest, of which each is swapped more or less where something stalls."""

CLOSE_TO_NONE = 0.05
"""Share of the step's time for which an order without repetitions may stall for such tries to be worth it
although other sequences are faster."""


@dataclass(frozen=True)
class WithinBudgetAndLink:
    """The answer for a budget and a link.

    Attributes:
        budget_bytes: of planned arrays, workspaces and what is lent.
        recomputation: the sequence; its own peak is that without transfers.
        transfers: what waits on the host.
        peak_bytes: most bytes alive at once with them.
        simulation: the sequence's time with stalls.
        bound: what is proven of repetitions and stalls together.
        step_seconds: of the step without either.
    """

    budget_bytes: Bytes
    recomputation: Recomputation
    transfers: tuple[Transfer, ...]
    peak_bytes: Bytes
    simulation: Simulation
    bound: LowerBound
    step_seconds: Seconds

    @property
    def is_met(self) -> bool:
        """True if the sequence is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def extra_seconds(self) -> Seconds:
        """Seconds of repetitions and stalls."""
        return self.recomputation.extra_seconds + self.simulation.stalled_seconds

    @property
    def gap_seconds(self) -> Seconds:
        """Seconds beyond those that are proven necessary."""
        return max(0.0, self.extra_seconds - self.bound.extra_seconds) if self.is_met else math.inf


def least_time_with_swaps(
    problems: RecomputationProblem | Sequence[RecomputationProblem],
    budget_bytes: Bytes,
    link: Link,
    *,
    deadline: float = math.inf,
    effort: float = 1.0,
    seed: int = 0,
    solver: str = "auto",
) -> WithinBudgetAndLink:
    """Return the fastest sequence within a budget, and what waits on the host meanwhile.

    Args:
        problems: the step, in one order or several.
        budget_bytes: of planned arrays, workspaces and what is lent.
        link: which copies.
        deadline: ``time.monotonic()`` at which to stop with what there is.
        effort: how many times the usual effort to spend on repetitions.
        seed: of random numbers.
        solver: for integer programs; see :func:`olla_solvers.recomputation.least_time.least_time`.

    Returns:
        The fastest that was found, which is never slower than repetitions alone; or, if none was within the
        budget, the one with the lowest peak.

    Raises:
        ProblemError: if order, seconds or makers do not fit a problem.
        SolverUnavailableError: if the solver is not installed.
    """

    def plan(
        given: RecomputationProblem | Sequence[RecomputationProblem], within: Bytes = budget_bytes
    ) -> Recomputation:
        answer = repetitions.least_time(
            given, within, deadline=deadline, effort=effort, seed=seed, solver=solver
        )
        return answer.recomputation

    alone = plan(problems)
    given = (problems,) if isinstance(problems, RecomputationProblem) else tuple(problems)
    order = tuple(execution.operator for execution in alone.executions if not execution.copy)
    problem = next(problem for problem in given if problem.order == order)
    planner = _Planner(problem, budget_bytes, link, deadline)
    planner.try_sequence(alone)
    try:
        for problem in given:
            planner.try_order(problem)
        planner.plan_around(plan, solver_for(solver))
        planner.lower(lambda larger: plan(problem, larger))
        planner.improve()
    except DeadlinePassedError:
        pass  # The best so far is an answer.
    return planner.answer()


def least_time_of_swaps(
    problem: RecomputationProblem, budget_bytes: Bytes, link: Link, *, deadline: float = math.inf
) -> WithinBudgetAndLink:
    """Return the fastest sequence within a budget in which nothing runs again, to compare with.

    Args:
        problem: the step.
        budget_bytes: of planned arrays, workspaces and what is lent.
        link: which copies.
        deadline: ``time.monotonic()`` at which to stop with what there is.

    Returns:
        The fastest that was found, or the one with the lowest peak if none was within the budget.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    planner = _Planner(problem, budget_bytes, link, deadline)
    planner.try_plain()
    try:
        planner.improve()
    except DeadlinePassedError:
        pass  # The best so far is an answer.
    return planner.answer()


class _Planner:
    """Plans of one order for one budget; the best is kept."""

    def __init__(
        self, problem: RecomputationProblem, budget_bytes: Bytes, link: Link, deadline: float
    ) -> None:
        self._problem = problem
        self._instance = prepare(problem)
        self._budget_bytes = budget_bytes
        self._link = link
        self._deadline = deadline
        self._bound = BoundsWithHost(self._instance, link).lower_bound(budget_bytes, deadline)
        self._best: tuple[Recomputation, Swapped] | None = None

    def plan_around(self, plan: Callable[[RecomputationProblem], Recomputation], solver: str | None) -> None:
        """Choose what is swapped, plan what is made again around that, and swap again in what comes out.

        Args:
            plan: plans what is made again.
            solver: for the choice of what is swapped, beside the greedy one.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        plain = self.try_plain()
        choices = [choose(plain, plain.gaps, self._link, self._budget_bytes, self._worth)]
        if solver is not None and not self._is_settled():
            left = self._deadline - time.monotonic()
            first = choose_by_program(
                self._instance, plain, self._link, self._bound, solver, by_the_clock=left
            )
            if first is not None:
                # The program fills the link at few operators; there may be room for others beside.
                choices.append(first)
                choices.append(
                    choose(plain, plain.gaps, self._link, self._budget_bytes, self._worth, first=first)
                )
        for chosen in choices:
            check_time(self._deadline)
            if self._is_settled():
                return
            stays = stays_of(plain, chosen, self._link, self._problem.lent)
            sequence = plan(replace(self._problem, stays=stays))
            self.try_sequence(sequence, {stay.array for stay in stays})

    def try_plain(self) -> Timeline:
        """Swap in the order without repetitions."""
        return self.try_sequence(_plain(self._instance))

    def try_order(self, problem: RecomputationProblem) -> None:
        """Swap in an order without repetitions, as well as that can be done if nothing stalls for long.

        Args:
            problem: the step in any order.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        sequence = _plain(prepare(problem))
        line = timeline(self._instance, sequence.executions)
        most = (1 + CLOSE_TO_NONE) * self._problem.step_seconds
        if line.begins[-1] + self._least_stall(line) > most:
            return
        gaps = choose(line, line.gaps, self._link, self._budget_bytes, lambda gap: 1.0, may_stall=True)
        swapped = within_budget(line, gaps, self._link, self._budget_bytes, most)
        self._offer(sequence, swapped)
        if swapped is not None and not self._is_settled():
            self._improve(sequence, line, swapped)

    def try_sequence(self, sequence: Recomputation, arrays: Collection[ArrayIndex] = ()) -> Timeline:
        """Swap in a sequence, and keep what comes out if it is the best.

        Args:
            sequence: any.
            arrays: that it was planned to swap.
        """
        line = timeline(self._instance, sequence.executions)
        self._offer(sequence, within_budget(line, (), self._link, self._budget_bytes))
        if line.peak_bytes <= self._budget_bytes:
            return line
        if arrays:
            longest = {gap.array: gap for gap in sorted(line.gaps, key=_length) if gap.array in arrays}
            self._try_gaps(sequence, line, sorted(longest.values()))
        if line.begins[-1] + self._least_stall(line) < self._most_seconds():
            self._try_gaps(
                sequence,
                line,
                choose(line, line.gaps, self._link, self._budget_bytes, lambda gap: 1.0, may_stall=True),
            )
        return line

    def _least_stall(self, line: Timeline) -> Seconds:
        """Return the seconds for which a sequence stalls at least, until enough is away at its peak."""
        at = max(range(len(line.seconds)), key=line.resident_bytes.__getitem__)
        beyond_bytes = line.peak_bytes - self._budget_bytes
        return max(0.0, beyond_bytes / self._link.out_bytes_per_second - line.begins[at])

    def _try_gaps(self, sequence: Recomputation, line: Timeline, gaps: Sequence[Gap]) -> None:
        most = self._most_seconds()
        self._offer(sequence, within_budget(line, gaps, self._link, self._budget_bytes, most))

    def lower(self, plan: Callable[[Bytes], Recomputation]) -> None:
        """Swap in sequences of larger budgets, if the budget is not met.

        Args:
            plan: plans repetitions within a budget.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        for share in LARGER:
            if self._bound.is_impossible or self._most_seconds() < math.inf:
                return
            check_time(self._deadline)
            self.try_sequence(plan(int(share * self._budget_bytes)))

    def improve(self) -> None:
        """Swap one array more or less in the best sequence, as long as that helps and stalls are left.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        if self._best is not None:
            sequence, swapped = self._best
            self._improve(sequence, timeline(self._instance, sequence.executions), swapped)

    def _improve(self, sequence: Recomputation, line: Timeline, best: Swapped) -> None:
        away = {(transfer.array, transfer.out_after) for transfer in best.transfers}
        chosen = {gap for gap in line.gaps if (gap.array, gap.out_after) in away}
        gaps = sorted(line.gaps, key=lambda gap: (-gap.size_bytes, gap))
        for gap in gaps[:MOST_TRIES]:
            check_time(self._deadline)
            if best.peak_bytes <= self._budget_bytes and not best.simulation.stalled_seconds:
                return
            most = best.seconds if best.peak_bytes <= self._budget_bytes else math.inf
            changed = chosen ^ {gap}
            swapped = within_budget(line, sorted(changed), self._link, self._budget_bytes, most)
            if swapped is not None and self._rank(swapped) < self._rank(best):
                best, chosen = swapped, changed
                self._offer(sequence, swapped)

    def answer(self) -> WithinBudgetAndLink:
        """Return the best plan."""
        if self._best is None:
            raise RuntimeError("no sequence was tried")
        recomputation, swapped = self._best
        line = timeline(self._instance, recomputation.executions)
        swapped = without_needless(line, swapped, self._link, self._budget_bytes)
        return WithinBudgetAndLink(
            self._budget_bytes,
            # It may have been planned around stays that its peak leaves out.
            replace(recomputation, peak_bytes=line.peak_bytes),
            swapped.transfers,
            swapped.peak_bytes,
            swapped.simulation,
            self._bound,
            self._problem.step_seconds,
        )

    def _offer(self, sequence: Recomputation, swapped: Swapped | None) -> None:
        if swapped is None:
            return
        if self._best is None or self._rank(swapped) < self._rank(self._best[1]):
            self._best = sequence, swapped

    def _rank(self, swapped: Swapped) -> tuple[float, float, int]:
        beyond = max(0, swapped.peak_bytes - self._budget_bytes)
        return beyond, swapped.seconds, len(swapped.transfers)

    def _most_seconds(self) -> Seconds:
        """Return the seconds of the best within the budget; no plan that takes more is of use."""
        if self._best is None or self._best[1].peak_bytes > self._budget_bytes:
            return math.inf
        return self._best[1].seconds

    def _is_settled(self) -> bool:
        """Return True if the best is as fast as is proven."""
        slack = CLOSE * self._problem.step_seconds
        extra = self._most_seconds() - self._problem.step_seconds
        return extra <= self._bound.extra_seconds + slack

    def _worth(self, gap: Gap) -> float:
        """Return a byte's worth if it is away: its price, or what making it again costs if that is less."""
        unit = self._instance.units.of_array[gap.array]
        if unit < 0:
            return 1.0
        sizes = self._instance.flat.array_bytes
        price = self._bound.price * sum(sizes[array] for array in self._instance.units.arrays[unit])
        seconds: Seconds = self._instance.units.seconds[unit]
        return min(1.0, seconds / price) if price else 1.0


def _plain(instance: Instance) -> Recomputation:
    return Evaluator(instance).recomputation(plain_states(instance))


def _length(gap: Gap) -> int:
    return gap.back_before - gap.out_after


def stays_of(
    line: Timeline, gaps: Sequence[Gap], link: Link, lent: Collection[ArrayIndex] = ()
) -> tuple[Stay, ...]:
    """Return which arrays are elsewhere between which positions of the order if some are swapped.

    Args:
        line: of the gaps.
        gaps: what is swapped, without stalls.
        link: which copies.
        lent: arrays that may be elsewhere more than once.
    """
    own = [timestep for timestep, execution in enumerate(line.executions) if not execution.copy]
    # A position begins with what runs again for its operator.
    began = [0, *(timestep + 1 for timestep in own[:-1])]
    length = len(line.executions)
    began += [timestep + length for timestep in began]
    stays: dict[ArrayIndex, list[Stay]] = {}
    for gap, (gone, back) in zip(gaps, places(line, gaps, link), strict=True):
        stay = Stay(gap.array, bisect_left(began, gone), bisect_right(began, back) - 1)
        if stay.gone_before < stay.back_from:
            stays.setdefault(gap.array, []).append(stay)
    return tuple(
        stay
        for array in sorted(stays)
        for stay in (stays[array] if array in lent else [max(stays[array], key=_positions)])
    )


def _positions(stay: Stay) -> int:
    return stay.back_from - stay.gone_before
