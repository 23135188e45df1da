"""Plans a step within a memory budget: graph → graph with the repetitions that it takes, and its plan.

The step is planned without recomputation first. If that does not fit,
:func:`olla_solvers.recomputation.least_time.least_time` chooses the fastest sequence that does, which is put
into the graph, ordered, placed and measured against the budget as any other plan. The buffer may come out a
little larger than the peak that was chosen for (copies, fragmentation), or smaller (another order); then less
is asked for, or more.

Kernels' workspaces, and which results are larger than operators say, are not known before a run was
recorded. After it the choice is made anew, with them and with the seconds that were measured then. They are
known by the kind of operator, so that they hold for the new graph, too, whose own run is recorded next.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from olla_fx.budget_answers import EFFORT, Answer, Sequences
from olla_fx.capture import Mode
from olla_fx.costs import DeviceProfile
from olla_fx.dataflow import Dataflow
from olla_fx.errors import CaptureError, SwapError
from olla_fx.memory_budget import MemoryBudget
from olla_fx.passes.rewrites import Wanted
from olla_fx.recomputation import RecomputableStep
from olla_fx.recomputed import BudgetTerms
from olla_fx.rewriting import Candidate, Rewriting
from olla_fx.sharing import choose_sharing
from olla_fx.step_plan import Plan
from olla_fx.workspaces import workspaces_of
from olla_solvers.effort.pace import Pace
from olla_solvers.recomputation.bounds import LowerBound
from olla_solvers.swapping.transfers import Link

logger = logging.getLogger(__name__)

MOST_ROUNDS = 5
"""How often less is asked for if a plan turns out larger than what was asked for, and more if smaller."""

CLOSE = 0.01
"""A plan that leaves a larger share of its room is not close to what fits."""

NEAR = 0.005
"""A plan so close to what is proven, as a share of the step's seconds, is fast enough."""

CLOSE_SECONDS = 1e-3
"""A plan that takes so much more than was chosen, as a share of the step's seconds, is as fast."""

LONGEST_SECONDS = 10.0
"""What a longer search may take, each time: by the clock, unless others use the processor, too."""

SLOWEST = 4.0
"""Times as long by the clock that it may take then."""

MOST_CHOICES = 3
"""How often the choice is made again after recorded runs."""

MakePlan = Callable[[Candidate, int], Plan]
"""Orders and places a candidate, for a buffer of so many bytes or less."""


@dataclass(frozen=True)
class BudgetedStep:
    """A step with a budget: what is needed to choose again what it recomputes.

    Attributes:
        rewriting: with the captured graph, and the workspaces that are known.
        wanted: the rewrites that pay, and these with those that take time, the fastest first; None for no
            rewrites. The graphs after them are made when they are needed: graphs are large.
        budget: the limit.
        includes_static: True if static arrays count in it.
        seconds: for choosing what is recomputed, by the clock.
        profile: of a device that is not there, whose time counts; None for the one that the step is for.
        solver: for integer programs; see :func:`olla_solvers.recomputation.least_time.least_time`.
        link: over which arrays may wait on the host; None if none may.
        choices: how often the choice was made again since a run was recorded.
        is_missed: True if the last choice has found no plan within the budget.
    """

    rewriting: Rewriting
    wanted: tuple[Wanted | None, ...]
    budget: MemoryBudget
    includes_static: bool = False
    seconds: float = math.inf
    profile: DeviceProfile | None = None
    solver: str = "auto"
    link: Link | None = None
    choices: int = 0
    is_missed: bool = False

    def knowing(self, dataflow: Dataflow, plan: Plan) -> BudgetedStep:
        """Return the step with the workspaces that a recorded run has shown, to choose again.

        Args:
            dataflow: of the graph that ran; it says which gradients are made in the buffer.
            plan: of it, with workspaces.
        """
        workspaces = workspaces_of(dataflow, plan.problem, self.rewriting.workspaces)
        rewriting = replace(self.rewriting, workspaces=workspaces, gradients=dataflow.gradients)
        # A share is one of what the step needs with workspaces; from then on the budget stays as it is.
        is_final = self.choices > 0 and plan.memory_budget_bytes is not None
        return replace(
            self,
            rewriting=rewriting,
            budget=MemoryBudget(plan.memory_budget_bytes) if is_final else self.budget,
            choices=self.choices + 1,
        )

    def chooses_again(self, plan: Plan) -> bool:
        """Return True if the choice is to be made again after a recorded run.

        Args:
            plan: of the graph that ran, with its workspaces.
        """
        if self.choices == 0:
            return True
        # Where nothing was found, nothing will be for the workspaces of more kinds of operators.
        return not self.is_missed and self.choices < MOST_CHOICES and not fits(plan)


def fits(plan: Plan) -> bool:
    """Return True if a plan is within its budget, or has none."""
    return plan.budget is None or plan.needed_bytes <= plan.budget.budget_bytes


def plan_within(
    step: BudgetedStep, make: MakePlan, candidates: Sequence[Candidate] = ()
) -> tuple[Candidate, Plan]:
    """Return the fastest plan that is found within a budget, or the smallest if none is.

    Args:
        step: which, and the budget.
        make: orders and places a graph.
        candidates: the graphs after the rewrites of the step; none to make them.
    """
    candidates = candidates or [step.rewriting.made_with(wanted) for wanted in step.wanted]
    plain = choose_sharing(step.rewriting, step.rewriting.ordered(candidates[0]))
    plan = make(plain, 0)
    # The terms say what counts.
    plan = replace(plan, budget=BudgetTerms(0, step.includes_static, 0))
    needed_bytes = plan.needed_bytes
    beside_bytes = needed_bytes - plan.buffer_bytes
    budget_bytes = step.budget.in_bytes(needed_bytes)
    terms = BudgetTerms(budget_bytes, step.includes_static, needed_bytes)
    plan = replace(plan, budget=terms)
    if needed_bytes <= budget_bytes:
        return plain, plan
    if step.rewriting.captured.mode is Mode.INFERENCE:
        least_bytes = plan.lower_bound_bytes + beside_bytes
        return plain, replace(plan, budget=replace(terms, least_bytes=least_bytes))
    room_bytes = budget_bytes - beside_bytes
    recomputable = [RecomputableStep.of(step.rewriting, rewritten, step.profile) for rewritten in candidates]
    step_seconds = recomputable[0].problem.step_seconds
    searches = [
        _Search(step, make, rewritten, step_seconds, plain=plain, plan=plan, room_bytes=room_bytes)
        for rewritten in recomputable
    ]
    search = searches[0] if len(searches) == 1 else min(searches, key=_Search.outlook)
    candidate, plan = search.run()
    if step.link is not None and (plan.needed_bytes > budget_bytes or search.is_slower_than_chosen):
        # A graph with transfers keeps its sequence; one without is ordered anew, and written over more.
        other, alone = plan_within(replace(step, link=None), make, candidates)
        if search.rank(alone) < search.rank(plan):
            candidate, plan = other, alone
    terms = replace(
        terms,
        least_bytes=min(search.bound.least_bytes for search in searches) + beside_bytes,
        least_extra_time=_share(min(search.least_extra_seconds for search in searches), step_seconds),
    )
    return candidate, replace(plan, budget=terms)


def _share(seconds: float, step_seconds: float) -> float:
    is_known = step_seconds > 0 and seconds < math.inf
    return seconds / step_seconds if is_known else 0.0


class _Search:
    """Asks for smaller and smaller sequences of one graph until a plan fits."""

    def __init__(
        self,
        step: BudgetedStep,
        make: MakePlan,
        recomputable: RecomputableStep,
        step_seconds: float,
        *,
        plain: Candidate,
        plan: Plan,
        room_bytes: int,
    ) -> None:
        """Begin with the plan without recomputation.

        Args:
            step: what to plan.
            make: orders and places a graph.
            recomputable: the step after some rewrites, in which something is to be recomputed.
            step_seconds: of the step without recomputation, after rewrites that take no time.
            plain: that graph.
            plan: of it.
            room_bytes: for the buffer.
        """
        self._has_workspaces = step.choices > 0
        self._deadline = time.monotonic() + step.seconds
        self._pace = Pace()
        self._make = make
        self._sequences = Sequences(recomputable, step.solver, step.link, step.profile)
        self._room_bytes = room_bytes
        self._plain_plan = plan
        self._best = plain, plan
        self._low: list[Answer] | None = None
        self._step_seconds = step_seconds

    @cached_property
    def _first(self) -> Answer:
        return self._sequences.fastest(max(0, self._room_bytes), self._deadline)

    @property
    def bound(self) -> LowerBound:
        """What is proven of the budget itself."""
        return self._first.bound

    @property
    def _rewritten_seconds(self) -> float:
        """What the rewrites compute again."""
        return self._sequences.step.problem.step_seconds - self._step_seconds

    @property
    def least_extra_seconds(self) -> float:
        """Seconds beyond those of the step without recomputation, as far as that is proven."""
        return self._rewritten_seconds + self.bound.extra_seconds

    @property
    def is_slower_than_chosen(self) -> bool:
        """True if the best plan takes more time in its graph than its sequence was chosen for."""
        chosen_seconds = self._rewritten_seconds + self._first.extra_seconds
        return _extra_seconds(self._best[1]) > chosen_seconds + CLOSE_SECONDS * self._step_seconds

    def outlook(self) -> tuple[int, float]:
        """Return by how much the budget is likely to be missed, and the extra seconds."""
        chosen = self._first
        return max(0, chosen.peak_bytes - self._room_bytes), self._rewritten_seconds + chosen.extra_seconds

    def run(self) -> tuple[Candidate, Plan]:
        """Return the fastest plan that fits, or the smallest."""
        deadline = self._deadline
        answer = first = self._answer(self._room_bytes, deadline)
        excess_bytes = self._try(answer)
        for round_number in range(MOST_ROUNDS):
            if excess_bytes <= 0 or not answer.is_met:
                break
            peak_bytes = min(answer.budget_bytes, answer.peak_bytes)
            # What stands in the way may be the same for a slightly smaller peak.
            answer = self._answer(peak_bytes - (excess_bytes << round_number), deadline)
            excess_bytes = self._try(answer)
        if answer.extra_seconds > first.bound.extra_seconds:
            self._ask_for_more(answer, -excess_bytes, deadline)
        return self._best

    def _ask_for_more(self, answer: Answer, left_bytes: int, deadline: float) -> None:
        """Try larger peaks than one whose plan, ordered anew, needs less than was asked for.

        Args:
            answer: with that peak.
            left_bytes: beside its plan.
            deadline: to stop at.
        """
        low = max(answer.budget_bytes, answer.peak_bytes)
        target_bytes = high = low + left_bytes
        least_seconds = self.bound.extra_seconds + NEAR * self._step_seconds
        for _ in range(MOST_ROUNDS):
            is_near = _extra_seconds(self._best[1]) - self._rewritten_seconds <= least_seconds
            if is_near or target_bytes - low < CLOSE * self._room_bytes:
                break
            answer = self._sequences.fastest(target_bytes, deadline)
            if self._try(answer, only_if_near=True) <= 0:
                low = target_bytes
            else:
                high = target_bytes
            target_bytes = (low + high) // 2

    def _answer(self, target_bytes: int, deadline: float) -> Answer:
        """Return the fastest sequence of a peak; if none is found, after a search that takes longer."""
        target_bytes = max(0, target_bytes)
        is_first = target_bytes == max(0, self._room_bytes)
        answer = self._first if is_first else self._sequences.fastest(target_bytes, deadline)
        if answer.is_met:
            return answer
        longest_seconds = self._pace.by_the_clock(LONGEST_SECONDS, most=SLOWEST)
        deadline = min(deadline, time.monotonic() + longest_seconds)
        if self._low is None:
            self._low = self._sequences.lowest(deadline)
        low = min(self._low, key=lambda known: known.peak_bytes)
        if low.peak_bytes > target_bytes:
            return low.asked_for(answer)
        within = [known for known in self._low if known.peak_bytes <= target_bytes]
        longer = self._sequences.fastest(target_bytes, deadline, EFFORT)
        if longer.is_met:
            within.append(longer)
        return min(within, key=lambda known: known.extra_seconds).asked_for(answer)

    def _try(self, answer: Answer, *, only_if_near: bool = False) -> int:
        """Plan an answer; return by how much the buffer is too large.

        Args:
            answer: to be put into the graph.
            only_if_near: True to leave it at that if it does not fit in an order that is found quickly.
        """
        try:
            candidate = self._sequences.candidate(answer)
        except (CaptureError, SwapError) as error:
            logger.warning("what was chosen for the memory budget cannot be carried out: %s", error)
            return 0
        if only_if_near and candidate.peak_bytes > self._room_bytes:
            return candidate.peak_bytes - self._room_bytes
        plan = self._make(candidate, self._room_bytes)
        saved_bytes = self._plain_plan.peak_bytes - plan.peak_bytes
        recomputed = replace(
            candidate.recomputed,
            saved_bytes=saved_bytes,
            with_workspaces=self._has_workspaces,
            extra_seconds=candidate.recomputed.extra_seconds + self._rewritten_seconds,
            step_seconds=self._step_seconds,
        )
        swapped = replace(candidate.swapped, step_seconds=self._step_seconds)
        plan = replace(plan, recomputed=recomputed, swapped=swapped, budget=self._plain_plan.budget)
        if self.rank(plan) < self.rank(self._best[1]):
            self._best = candidate, plan
        return plan.buffer_bytes - self._room_bytes

    def rank(self, plan: Plan) -> tuple[int, float]:
        """Return by how much a plan misses the budget, and its extra seconds."""
        return max(0, plan.buffer_bytes - self._room_bytes), _extra_seconds(plan)


def _extra_seconds(plan: Plan) -> float:
    return plan.recomputed.extra_seconds + plan.swapped.stalled_seconds


def is_same_graph(one: Dataflow, other: Dataflow) -> bool:
    """Return True if the graphs of two dataflows have the same nodes with the same arguments."""
    return [_described(node) for node in one.graph_module.graph.nodes] == [
        _described(node) for node in other.graph_module.graph.nodes
    ]


def _described(node: fx.Node) -> tuple[object, ...]:
    return node.name, node.target, str(node.args), str(node.kwargs)
