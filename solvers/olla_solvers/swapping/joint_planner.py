"""Plans what is kept, made again and swapped of one step for one budget; the best is kept.

:mod:`olla_solvers.swapping.least_time` says by which method.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError, check_time
from olla_solvers.problem import Bytes
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
from olla_solvers.recomputation.residency import SETTLED
from olla_solvers.swapping.bounds import BoundsWithHost
from olla_solvers.swapping.choice import choose
from olla_solvers.swapping.choice_program import Solve, choose_by_program
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.repetitions import Repetitions
from olla_solvers.swapping.schedule import Swapped, within_budget, without_needless
from olla_solvers.swapping.simulate import Simulation
from olla_solvers.swapping.stays import stays_of
from olla_solvers.swapping.timeline import Timeline, timeline
from olla_solvers.swapping.transfers import Link, Transfer

LARGER = 1.05, 1.1, 1.2, 1.4, 1.7, 2.0
"""Budgets, as multiples, whose sequences are swapped in if the budget is met in no other way."""

MOST_TRIES = 60
"""Arrays, from the largest, of which each is swapped more or less where something stalls."""

FAR = 0.03
"""Share of the step's time by which a plan around what is swapped must be slower than what is proven of it
for other orders to be tried."""

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


class JointPlanner:
    """Plans of one order for one budget; the best is kept."""

    def __init__(
        self, problem: RecomputationProblem, budget_bytes: Bytes, link: Link, deadline: float
    ) -> None:
        """Prove how fast a step can be.

        Args:
            problem: in the order to begin with.
            budget_bytes: of planned arrays, workspaces and what is lent.
            link: which copies.
            deadline: ``time.monotonic()`` at which to stop with what there is.
        """
        self._problem = problem
        self._instance = prepare(problem)
        self._budget_bytes = budget_bytes
        self._link = link
        self._deadline = deadline
        self._bound = BoundsWithHost(self._instance, link).lower_bound(budget_bytes, deadline)
        self._best: tuple[Recomputation, Swapped] | None = None

    def plan(
        self,
        problems: Sequence[RecomputationProblem],
        repetitions: Repetitions,
        solve: Solve | None,
        report: Callable[[], None],
    ) -> None:
        """Swap, make again, and do both, until the deadline passes or nothing better is possible.

        Args:
            problems: the step, in one order or several.
            repetitions: plans what is made again.
            solve: solves programs for the choice of what is swapped, beside the greedy one.
            report: called when there may be something better.
        """
        try:
            for problem in problems:
                if self.try_order(problem):
                    report()
                if self._most_seconds() < math.inf and self._is_settled():
                    return
                check_time(self._deadline)
        except DeadlinePassedError:
            pass  # What is made again is planned in no time, if need be.
        try:
            is_near = self._plan_around(problems, repetitions, report)
            if solve is not None and is_near and not self._is_settled():
                self._plan_around_choice(repetitions, solve, report)
        except DeadlinePassedError:
            pass
        most = self._most_seconds() - self._problem.step_seconds
        self.try_sequence(repetitions.alone(self._budget_bytes, most))
        report()
        try:
            self._lower(repetitions)
            self.improve()
        except DeadlinePassedError:
            pass  # The best so far is an answer.

    def _plan_around(
        self,
        problems: Sequence[RecomputationProblem],
        repetitions: Repetitions,
        report: Callable[[], None],
    ) -> bool:
        """Choose greedily what is swapped, and plan what is made again around that.

        Further orders are for where the first is far from what is proven of it.

        Returns:
            True if one is not: then it is the choice that limits it.
        """
        for problem in problems:
            check_time(self._deadline)
            line = timeline(self._instance, _plain(prepare(problem)).executions)
            chosen = choose(line, line.gaps, self._link, self._budget_bytes, self._worth)
            proven = self._try_around(problem, stays_of(line, chosen, self._link, problem.lent), repetitions)
            report()
            if self._most_seconds() <= proven + (1 + FAR) * self._problem.step_seconds:
                return True
        return False

    def _plan_around_choice(self, repetitions: Repetitions, solve: Solve, report: Callable[[], None]) -> None:
        """Have a program choose what is swapped in the best order, and plan what is made again around it."""
        line = timeline(self._instance, _plain(self._instance).executions)
        left = self._deadline - time.monotonic()
        first = choose_by_program(self._instance, line, self._link, self._bound, solve, by_the_clock=left)
        if first is None:
            return
        # The program fills the link at few operators; there may be room for others beside.
        chosen = choose(line, line.gaps, self._link, self._budget_bytes, self._worth, first=first)
        check_time(self._deadline)
        self._try_around(self._problem, stays_of(line, chosen, self._link, self._problem.lent), repetitions)
        report()

    def _try_around(
        self, problem: RecomputationProblem, stays: tuple[Stay, ...], repetitions: Repetitions
    ) -> Seconds:
        """Plan what is made again around stays, and swap again in what comes out; return what is proven.

        If the best so far comes out, its order is the one to go on with.
        """
        before, most = self._best, self._most_seconds() - self._problem.step_seconds
        around = replace(problem, stays=stays)
        sequence, proven = repetitions.around(around, self._budget_bytes, most)
        self.try_sequence(sequence, {stay.array for stay in stays})
        if self._best is not before and problem is not self._problem:
            self._problem, self._instance = problem, prepare(problem)
        return proven

    def try_plain(self) -> Timeline:
        """Swap in the order without repetitions."""
        return self.try_sequence(_plain(self._instance))

    def try_order(self, problem: RecomputationProblem) -> bool:
        """Swap in an order without repetitions, as well as that can be done if nothing stalls for long.

        Args:
            problem: the step in any order.

        Returns:
            True if something came out.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        sequence = _plain(prepare(problem))
        line = timeline(self._instance, sequence.executions)
        most = (1 + CLOSE_TO_NONE) * self._problem.step_seconds
        if line.begins[-1] + self._least_stall(line) > most:
            return False
        gaps = choose(line, line.gaps, self._link, self._budget_bytes, lambda gap: 1.0, may_stall=True)
        swapped = within_budget(line, gaps, self._link, self._budget_bytes, most)
        self._offer(sequence, swapped)
        if swapped is not None and not self._is_settled():
            self._improve(sequence, line, swapped)
        return swapped is not None

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

    def _lower(self, repetitions: Repetitions) -> None:
        """Swap in sequences of larger budgets, if the budget is not met."""
        for share in LARGER:
            if self._bound.is_impossible or self._most_seconds() < math.inf:
                return
            check_time(self._deadline)
            self.try_sequence(repetitions.alone(int(share * self._budget_bytes)))

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
        slack = SETTLED * self._problem.step_seconds
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
