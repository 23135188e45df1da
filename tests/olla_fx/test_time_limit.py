"""The time limit: one for all the plans that are made in a call."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import compile as pipeline
from olla_fx.time_limit import TimeLimit
from olla_solvers.effort import apart
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem
from olla_solvers.recomputation import least_time
from tests.olla_fx.budgets import batches, network
from tests.olla_fx.helpers import MOMENTUM, SmallNet, images
from tests.olla_fx.run.whole_step.clipped import ClippedStep

LIMIT = 1000.0


class Planner:
    """Plans for real, as if it took as long as it may, or no time at all; notes the limits that it was given.

    Attributes:
        limits: of each plan, in seconds.
        uses_all: True if the next plans are to take all their time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the pipeline's planner, and for the clock of time limits."""
        self.limits: list[float | None] = []
        self.uses_all = True
        self._now = 0.0
        self._make_plan = pipeline.make_plan
        monkeypatch.setattr(pipeline, "make_plan", self)
        monkeypatch.setattr("olla_fx.time_limit.time", self)

    def monotonic(self) -> float:
        """Return the time as far as planning took any."""
        return self._now

    def __call__(self, problem: Problem, *, time_limit: float | None, **options: object) -> MemoryPlan:
        """Plan, by the cheap methods alone if there is a limit."""
        self.limits.append(time_limit)
        if self.uses_all and time_limit is not None:
            self._now += time_limit
        return self._make_plan(problem, time_limit=None if time_limit is None else 0, **options)

    def taken(self) -> list[float | None]:
        """Return the limits since the last time."""
        limits, self.limits = self.limits, []
        return limits


@pytest.fixture(autouse=True)
def no_plans_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every plan."""
    monkeypatch.setenv("OLLA_FX_CACHE_DIR", "")


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    return Planner(monkeypatch)


def whole_step(batch_size: int = 4, **options: object) -> tuple[olla_fx.PlannedModule, list[torch.Tensor]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    example = torch.randn(batch_size, 6), torch.zeros(batch_size, dtype=torch.long)
    loss_fn = nn.functional.cross_entropy
    options = {"fallback": "raise", **options}
    return olla_fx.optimize(model, example, loss_fn=loss_fn, optimizer=optimizer, **options), list(example)


def test_plans_of_a_call_share_what_is_left(planner: Planner) -> None:
    limit = TimeLimit(8, plans=1)
    limit.expect(3)
    for part, uses in ((2, True), (2, False), (3, True), (3, True), (0, True)):
        planner.uses_all = uses
        with limit.next_plan() as seconds:
            planner(Problem((), ()), time_limit=seconds, solver="none")
        assert seconds == part


def test_a_plan_that_fails_counts(planner: Planner) -> None:
    def fail(seconds: float | None) -> None:
        planner(Problem((), ()), time_limit=seconds, solver="none")
        raise MemoryError

    limit = TimeLimit(8, plans=2)
    with pytest.raises(MemoryError), limit.next_plan() as seconds:
        fail(seconds)
    with limit.next_plan() as seconds:
        assert seconds == 4


def test_without_a_limit_no_plan_has_one(planner: Planner) -> None:
    step, example = whole_step(accumulation_steps=2)
    step(*example)
    assert planner.taken() == [None] * 4


def test_micro_batches_and_update_share_the_limit(planner: Planner) -> None:
    step, example = whole_step(accumulation_steps=2, time_limit=LIMIT)
    assert planner.taken() == [LIMIT / 2, LIMIT / 2]
    step(*example)
    assert planner.taken() == [LIMIT / 2, LIMIT / 2]
    planner.uses_all = False
    step.replan()
    step(*example)
    assert planner.taken() == [LIMIT / 4, LIMIT / 3, LIMIT / 2, LIMIT]


def test_plans_for_another_size_have_a_limit_of_their_own(planner: Planner) -> None:
    step, example = whole_step(time_limit=LIMIT, dynamic=False)
    step(*example)
    assert planner.taken() == [LIMIT, LIMIT]
    step(*(tensor.repeat(2, *[1] * (tensor.dim() - 1)) for tensor in example))
    assert planner.taken() == [LIMIT / 2, LIMIT / 2]


def test_a_backward_has_a_limit_of_its_own(planner: Planner) -> None:
    module = olla_fx.optimize(nn.Linear(3, 2), torch.randn(4, 3), time_limit=LIMIT, fallback="raise")
    assert planner.taken() == [LIMIT]
    answer = module(torch.randn(4, 3))
    assert planner.taken() == []
    answer.sum().backward()
    assert planner.taken() == [LIMIT]


def within_budget(**options: object) -> tuple[olla_fx.PlannedModule, list[torch.Tensor]]:
    model = network()
    example = batches(1)[0]
    options = {"memory_budget": 0.7, "loss_fn": nn.functional.cross_entropy, **options}
    return olla_fx.optimize(model, example, optimizer=MOMENTUM(model.parameters()), **options), list(example)


def test_a_plan_without_repetitions_leaves_time_for_those_with(planner: Planner) -> None:
    step, example = within_budget(time_limit=LIMIT)
    without, first, *others = planner.taken()
    assert (without, first) == (pytest.approx(LIMIT / 3), pytest.approx(LIMIT / 3))
    assert sum(others) <= LIMIT / 3 + 1
    step(*example)
    again, without, first, *_ = planner.taken()
    assert again == without == first == pytest.approx(LIMIT / 4)


def test_a_short_limit_leaves_time_for_what_a_budget_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs and walks for it run in a process, which takes a while to begin."""
    seconds = []

    def last_answer(function: object, arguments: object, by_the_clock: float) -> None:
        if function is least_time.curve_apart:
            seconds.append(by_the_clock)

    monkeypatch.setattr(apart, "last_answer", last_answer)
    olla_fx.plan(
        network(depth=12), batches(1)[0][0], memory_budget=0.7, time_limit=1, solver="highs", baseline=False,
        device_profile="a100",
    )  # fmt: skip
    assert seconds[0] > apart.LEAST_SECONDS


def test_a_limit_of_zero_still_plans_everything() -> None:
    pair = ClippedStep(SmallNet(), MOMENTUM, images(1, batch=6)[0], parts=3, time_limit=0)
    pair.run(images(4, batch=6))
    for plan in (pair.step.plan, pair.step.plan.update):
        assert plan.buffer_bytes >= plan.peak_bytes >= plan.lower_bound_bytes


def test_the_last_of_real_plans_has_what_the_first_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, make_plan = [], pipeline.make_plan

    def recording(problem: Problem, *, time_limit: float, **options: object) -> MemoryPlan:
        started = time.monotonic()
        plan = make_plan(problem, time_limit=time_limit, **options)
        limits.append((time_limit, time.monotonic() - started))
        return plan

    monkeypatch.setattr(pipeline, "make_plan", recording)
    model = SmallNet()
    optimizer = torch.optim.Adam(model.parameters())
    options = {"accumulation_steps": 3, "solver": "cbc", "time_limit": 4}
    loss_fn = nn.functional.cross_entropy
    plan = olla_fx.plan(model, images(1, batch=6)[0], loss_fn=loss_fn, optimizer=optimizer, **options)
    (first, taken), (second, _) = limits
    assert first == 2
    assert second <= max(0, 4 - taken)
    for part in (plan, plan.update):
        assert part.provenance.order_solver.solver == "cbc"
        assert part.buffer_bytes >= part.peak_bytes >= part.lower_bound_bytes
