"""Gradients that accumulate over parts of a batch, and clipping, as parts of a whole step."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import olla_fx
from olla_fx import CaptureError
from olla_solvers.errors import OptionError
from tests.olla_fx.helpers import ADAMW, MOMENTUM, SmallNet, images, mlp, sgd, vectors
from tests.olla_fx.run.whole_step.clipped import ClippedStep


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
@pytest.mark.parametrize(
    "options",
    [
        {"parts": 3},
        {"norm": 0.05},
        {"value": 0.01},
        {"parts": 2, "norm": 0.05, "value": 0.02},
        {"parts": 6, "return_outputs": True, "outputs": 2},
        {"norm": 0.05, "scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)},
    ],
    ids=["parts", "norm", "value", "all", "outputs", "schedule"],
)
def test_twenty_steps(make, options):
    pair = ClippedStep(SmallNet(), make, images(1, batch=6)[0], **options)
    pair.run(images(20, batch=6))
    assert pair.step.stats.replans == 0


def test_parts_of_a_batch_need_less_memory():
    peaks = []
    for parts in (1, 4):
        model = SmallNet()
        plan = olla_fx.plan(
            model,
            images(1, batch=8, size=24)[0],
            loss_fn=F.cross_entropy,
            optimizer=sgd(model.parameters()),
            accumulation_steps=parts,
            solver="none",
        )
        peaks.append(plan.peak_bytes)
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"accumulation_steps": 3}, CaptureError, "batch of 4 cannot be cut into 3"),
        ({"accumulation_steps": 0}, OptionError, "at least 1, not 0"),
        ({"accumulation_steps": True}, OptionError, "at least 1, not True"),
        ({"clip_grad_norm": -1}, OptionError, "above 0 or None, not -1"),
        ({"clip_grad_value": "1"}, OptionError, "above 0 or None, not '1'"),
    ],
)
def test_meaningless_options_are_refused(options, error, said):
    model = mlp()
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(error, match=said):
            function(
                model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), **options
            )


def test_the_options_belong_to_whole_steps():
    with pytest.raises(CaptureError, match="parts of a whole training step"):
        olla_fx.optimize(mlp(), vectors(1)[0][0], clip_grad_norm=1.0)


@pytest.mark.parametrize("options", [{"parts": 2}, {"norm": 0.05}])
def test_gradients_that_are_one_tensor(options):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
            self.c = nn.Parameter(torch.randn(()))

        def forward(self, x):
            return F.linear(x, self.a + self.b) + self.c

    ClippedStep(Shared(), MOMENTUM, vectors(1)[0], **options).run(vectors(5))
