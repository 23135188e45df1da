"""A memory budget is met in the least time that is found; where no plan meets it, the error says why."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import BudgetError, within_budget
from olla_fx.step_plan import Plan
from olla_solvers.recomputation import least_time
from tests.olla_fx.budgets import RUNS, network, plan
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import images, sgd
from tests.olla_fx.recomputation.models import MODELS


@pytest.fixture
def quick(monkeypatch):
    """Do not search long where a budget is not met."""
    monkeypatch.setattr(within_budget, "EFFORT", 1.0)


def test_less_memory_takes_more_time():
    plans = [plan(share) for share in (1.0, 0.9, 0.8, 0.7, 0.5)]
    needed = [planned.needed_bytes for planned in plans]
    extra = [planned.extra_time for planned in plans]
    assert needed == sorted(needed, reverse=True)
    assert extra == sorted(extra)
    assert extra[0] == 0 < extra[-1]
    for planned in plans:
        assert planned.needed_bytes <= planned.memory_budget_bytes
        assert 0 <= planned.extra_time_bound <= planned.extra_time
        assert planned.budget.least_bytes <= planned.needed_bytes


def test_a_budget_in_bytes_is_that_of_its_share():
    share = plan(0.7)
    alike = plan(share.memory_budget_bytes)
    assert alike.needed_bytes == share.needed_bytes
    assert alike.extra_time == share.extra_time


def test_static_arrays_count_if_asked_for():
    model = network(channels=16)
    alone = plan(0.7, model)
    both = plan("1GiB", model, memory_budget_includes="static")
    assert both.needed_bytes == both.total_bytes == both.budget.plain_bytes
    tight = plan(both.total_bytes - 1, model, memory_budget_includes="static")
    assert tight.needed_bytes == tight.total_bytes < both.total_bytes
    assert tight.recomputed.operators
    assert alone.needed_bytes == alone.total_bytes - alone.static_bytes


def test_more_than_is_needed_changes_nothing(caplog):
    with caplog.at_level("INFO", logger="olla_fx"):
        planned = plan("1GiB")
    assert "is more than the step needs: nothing is recomputed" in caplog.text
    assert dict(planned.rows())["recomputed for it"] == "nothing, the step fits"
    assert not planned.recomputed.operators
    assert planned.peak_bytes == plan(None, recompute=0).peak_bytes


def test_a_plan_tells_its_budget(tmp_path):
    planned = plan(0.7)
    rows = dict(planned.rows())
    assert "memory budget for buffer, outputs" in rows
    assert rows["extra time within it, proven"].startswith("at least ")
    assert "estimated for a100" in rows["extra time for it, predicted"]
    planned.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.budget == planned.budget
    assert loaded.memory_budget_bytes == planned.memory_budget_bytes
    assert loaded.extra_time_bound == planned.extra_time_bound
    assert plan(None).memory_budget_bytes is None


@pytest.mark.usefixtures("quick")
def test_a_budget_that_is_proven_impossible():
    with pytest.raises(BudgetError, match="no plan within the memory budget of 1,000 B was found") as caught:
        plan(1000)
    text = str(caught.value)
    assert caught.value.is_proven
    assert caught.value.needed_bytes > 1000
    assert re.search(
        r"(at least [\d.,]+ (MiB|B) are proven necessary|less than that is proven impossible)", text
    )
    assert re.search(r"Most is alive at \w+.*; the largest arrays then are .* made at \S+\.py:\d+\)", text)
    # Five classes are no large part of it.
    assert text.endswith("Take a smaller batch or accumulation_steps")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("loss_chunks", "advised"), [(None, True), (4, False)])
def test_large_logits_are_told_how_to_be_computed_in_chunks(loss_chunks, advised):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 640))
    example = torch.randn(256, 16), torch.randint(640, (256,))
    with pytest.raises(BudgetError) as caught:
        olla_fx.plan(
            model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), memory_budget="1KiB",
            baseline=False, device_profile="a100", loss_chunks=loss_chunks,
        )  # fmt: skip
    assert str(caught.value).endswith("accumulation_steps or loss_chunks") is advised


@pytest.mark.usefixtures("quick")
def test_static_arrays_that_take_the_whole_budget_are_told():
    """No batch is small enough then."""
    static_bytes = plan(1.0).static_bytes
    with pytest.raises(BudgetError, match="alone take the whole budget: take a larger one"):
        plan(static_bytes, memory_budget_includes="static")
    with pytest.raises(BudgetError, match="Take a smaller batch or accumulation_steps"):
        plan(static_bytes + 1000, memory_budget_includes="static")


@pytest.mark.usefixtures("quick")
def test_a_byte_too_little_is_told_in_bytes():
    smallest = nn.Sequential(nn.Linear(512, 512))
    example = torch.randn(2, 512), torch.randint(512, (2,))
    options = {"loss_fn": F.cross_entropy, "optimizer": sgd(smallest.parameters()), "baseline": False}
    needed_bytes = olla_fx.plan(smallest, example, memory_budget=1.0, **options).needed_bytes
    told = f"budget of {needed_bytes - 1:,} B .* needs {needed_bytes:,} B .* Take a smaller batch or acc"
    with pytest.raises(BudgetError, match=told):
        olla_fx.plan(smallest, example, memory_budget=needed_bytes - 1, **options)


@pytest.mark.parametrize(("solver", "asked"), [("none", None), ("highs", "highs"), ("cbc", "cbc")])
def test_the_solver_that_was_asked_for_states_programs(solver, asked, monkeypatch):
    solvers = []

    def last_answer(function, arguments, seconds):
        solvers.append(arguments[-1])

    monkeypatch.setattr(least_time.apart, "last_answer", last_answer)
    planned = plan(0.7, network(depth=12), solver=solver)
    assert planned.needed_bytes <= planned.memory_budget_bytes
    assert set(solvers) == ({asked} if asked else set())


def plan_of(name, budget):
    make, examples = MODELS[name]
    torch.manual_seed(0)
    model, example = make(), examples(1)[0]
    options = {"memory_budget": budget, "baseline": False, "device_profile": "a100"}
    return olla_fx.plan(model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), **options)


def test_less_memory_takes_more_time_in_calls_of_their_own():
    plans = [plan_of("transformer", share) for share in (0.9, 0.7, 0.5)]
    needed = [planned.needed_bytes for planned in plans]
    extra = [planned.extra_time for planned in plans]
    assert needed == sorted(needed, reverse=True)
    assert extra == sorted(extra)


@pytest.mark.usefixtures("quick")
def test_every_budget_that_is_too_small_is_told_the_same_plan():
    told = set()
    for share in (0.5, 0.3):
        with pytest.raises(BudgetError) as caught:
            plan_of("residual", share)
        told.add(caught.value.needed_bytes)
    assert len(told) == 1
    smallest = told.pop()
    assert plan_of("residual", smallest).needed_bytes <= smallest


@pytest.mark.parametrize(
    "name",
    [
        "lstm cell",
        "lstm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "skip", "shared")),
    ],
)
@pytest.mark.usefixtures("quick")
def test_the_smallest_plan_that_is_told_is_found(name):
    make, examples = MODELS[name]
    torch.manual_seed(0)
    model, given = make(), examples(RUNS)
    with pytest.raises(BudgetError) as caught:
        OwnLoop(model, given[0][0], memory_budget=1)
    loop = OwnLoop(model, given[0][0], memory_budget=caught.value.needed_bytes)
    assert loop.step.plan.needed_bytes <= caught.value.needed_bytes
    with warnings.catch_warnings():
        # The kernels' workspaces may not fit beside it.
        warnings.filterwarnings("ignore", "no plan within the memory budget")
        loop.run(given)
    loop.assert_served()


def test_a_loss_is_computed_in_chunks_if_the_budget_needs_it():
    def within(budget):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(128, 640, bias=False))
        example = torch.randn(1024, 128), torch.randint(640, (1024,))
        options = {"baseline": False, "device_profile": "a100", "loss_chunks": 4}
        return olla_fx.plan(
            model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()),
            memory_budget=budget, **options,
        )  # fmt: skip

    whole, chunked = within(0.8), within(0.6)
    assert not any(change.rewrite == "chunked_loss" for change in whole.changes)
    assert any(change.rewrite == "chunked_loss" for change in chunked.changes)
    # What chunks compute again counts.
    again_seconds = sum(array.seconds for array in chunked.recomputed.arrays)
    assert chunked.recomputed.extra_seconds > again_seconds
    assert 0 <= chunked.extra_time_bound <= chunked.extra_time
    assert chunked.recomputed.step_seconds == whole.recomputed.step_seconds


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_is_an_error_first_and_later_a_warning():
    model, small, large = network(), *(images(1, batch=size, size=24)[0] for size in (2, 16))
    with pytest.raises(BudgetError):
        olla_fx.optimize(model, large, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()),
                         memory_budget="100KiB")  # fmt: skip
    budget = plan(None, model).needed_bytes
    step = WholeStep(model, sgd, small, memory_budget=budget, fallback="eager", runs_to_settle=3)
    step.train(small)
    step.train(small)
    with pytest.warns(RuntimeWarning, match=r"no plan within the memory budget of .* The step runs with it"):
        step.run([large] * 3)
    step.compare()
