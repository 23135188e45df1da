"""A network that is planned within memory budgets, and whether one was kept."""

import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.eager.baseline import baseline_from_events
from tests.olla_fx.harness import assert_served
from tests.olla_fx.helpers import images, sgd

RUNS = 5
"""Enough to settle: a choice may be made again after each of the first recorded runs."""


def network(depth=4, channels=8):
    torch.manual_seed(0)
    layers, inputs = [], 3
    for _ in range(depth):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


def batches(count=RUNS):
    return images(count, batch=4, size=24)


def plan(budget, model=None, **options):
    model = model or network()
    options = {"baseline": False, "device_profile": "a100", **options}
    return olla_fx.plan(
        model,
        batches(1)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        memory_budget=budget,
        **options,
    )


def measured_peak(run):
    """Return the most bytes that a run had requested and not yet freed."""
    with olla_fx.record() as recording:
        run()
    return baseline_from_events(recording.events).live_peak_bytes


def assert_kept(module):
    """Assert that the last run was settled and within the budget, with what was asked for outside."""
    planned = module.plan
    assert planned.workspaces_recorded
    assert_served(module)
    assert planned.memory_budget_bytes is not None
    assert planned.buffer_bytes + planned.output_bytes + planned.gradient_bytes == planned.needed_bytes
    assert planned.needed_bytes <= planned.memory_budget_bytes
