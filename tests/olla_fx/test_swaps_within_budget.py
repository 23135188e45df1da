"""A memory budget is kept by what waits on the host, too: same bits, in no more time than without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import compile as pipeline
from olla_fx import disk_cache
from olla_fx.errors import SwapError
from tests.olla_fx.budgets import measured_peak
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import MOMENTUM
from tests.olla_fx.recomputation.models import MODELS

LINK = "2GB/s"


def stated(name, **options):
    make, batches = MODELS[name]
    torch.manual_seed(0)
    return make(), batches, {"memory_budget": 0.7, "link": LINK, **options}


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_a_whole_step_within_a_budget(name):
    model, batches, options = stated(name)
    pair = WholeStep(model, MOMENTUM, batches(1)[0], runs_to_settle=4, **options).run(batches(6))
    assert_served(pair.step)
    plan = pair.step.plan
    assert plan.swapped.arrays
    assert plan.host_bytes
    assert plan.needed_bytes <= plan.memory_budget_bytes
    assert measured_peak(lambda: pair.step(*batches(1)[0])) <= plan.memory_budget_bytes


@pytest.mark.filterwarnings("ignore:no plan within the memory budget")
def test_what_is_told_is_of_the_last_choice(tmp_path, monkeypatch):
    """As of what is computed again: by the seconds that were measured before it."""
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path))
    # Whether another choice gives the same graph depends on the machine.
    monkeypatch.setattr(pipeline, "is_same_graph", lambda one, other: True)
    model, batches, options = stated("residual")
    pair = WholeStep(model, MOMENTUM, batches(1)[0], runs_to_settle=4, **options).run(batches(2))
    plan = pair.step.plan
    assert plan.swapped.arrays
    assert "measured here" in plan.recomputed.costs
    assert plan.swapped.costs == plan.recomputed.costs


def test_an_own_loop_within_a_budget():
    model, batches, options = stated("residual", memory_budget=0.85)
    loop = OwnLoop(model, batches(1)[0][0], **options).run(batches(6))
    assert_served(loop.step)
    assert loop.step.plan.swapped.arrays
    assert loop.step.plan.needed_bytes <= loop.step.plan.memory_budget_bytes


def deep():
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh())))


def planned(**options):
    model, loss_fn = deep(), nn.functional.mse_loss
    x = torch.randn(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return olla_fx.plan(
        model, (x, x), loss_fn=loss_fn, optimizer=optimizer, baseline=False, device_profile="a100", **options
    )


def test_it_takes_no_more_time_than_repetitions_alone():
    alone = planned(memory_budget=0.6, swap=False)
    both = planned(memory_budget=0.6, link="100GB/s")
    assert both.swapped.arrays
    assert both.needed_bytes <= both.memory_budget_bytes
    assert both.extra_time <= alone.extra_time + 1e-9
    assert "swapped to the host" in str(both.report())


def test_what_stalls_in_its_graph_alone_is_not_taken():
    """What was chosen to wait for nothing may wait for copies once its graph is there."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(256, 32))
    example = torch.randn(512, 256), torch.randint(32, (512,))

    def within(**options):
        return olla_fx.plan(
            model, example, loss_fn=nn.functional.cross_entropy, optimizer=MOMENTUM(model.parameters()),
            memory_budget=0.95, device_profile="a100", baseline=False, **options,
        )  # fmt: skip

    assert within(link="4GB/s").extra_time <= within(swap=False).extra_time + 1e-3


def test_what_fits_swaps_nothing():
    assert not planned(memory_budget="1GiB", link="16GB/s").swapped.arrays


def test_without_a_link_nothing_can_be_swapped_on_a_cpu():
    with pytest.raises(SwapError, match="there is no link to measure"):
        planned(memory_budget=0.6, swap=True)
