"""Gradient checkpoints in a model are recomputed in the plan, too, at no more memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import olla_fx
from olla_fx import CaptureError
from olla_fx.arena import record_events
from olla_fx.eager.baseline import baseline_from_events
from tests.olla_fx.capture.refusals import Changed, refused
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


def test_reentrant_checkpoints_are_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(6, 6), mlp()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=True)

    with pytest.raises(CaptureError, match="use_reentrant=False"):
        olla_fx.optimize(Checkpointed(), vectors(1)[0][0], fallback="raise")


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(32)

    def forward(self, x):
        return self.norm(x + self.drop(self.second(F.gelu(self.first(x)))))


class Blocks(nn.Module):
    """Blocks, each recomputed in backward."""

    def __init__(self, dropout=0.0, how="each"):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(6)))
        self.head, self.how = nn.Linear(32, 5), how

    def forward(self, x):
        if self.how == "sequential":
            return self.head(checkpoint_sequential(self.blocks, 3, x, use_reentrant=False))
        if self.how == "nested":
            return self.head(checkpoint(self.outer, x, use_reentrant=False))
        return self.head(self.outer(x) if self.how == "each" else self.blocks(x))

    def outer(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(64, 32, generator=generator), torch.randint(5, (64,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("how", ["each", "sequential", "nested"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_twenty_steps(dropout, how):
    pair = WholeStep(Blocks(dropout, how), sgd, batches(1)[0]).run(batches(20))
    assert pair.step.plan.checkpointed_operators > 0
    assert "recomputed for checkpoints" in str(pair.step.report())


def test_an_own_loop():
    pair = OwnLoop(Blocks(0.3), batches(1)[0][0]).run(batches(20))
    pair.assert_served()
    assert pair.step.plan.checkpointed_operators > 0


def planned(model):
    return olla_fx.plan(
        model, batches(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), solver="none"
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("how", ["each", "sequential"])
def test_no_more_memory_than_eager_with_checkpoints(how, dropout):
    recomputed, plain = planned(Blocks(dropout, how)), planned(Blocks(dropout, "plain"))
    assert recomputed.peak_bytes <= recomputed.baseline.live_peak_bytes
    assert recomputed.peak_bytes < plain.peak_bytes / 1.5
    assert plain.checkpointed_operators == 0
    assert (
        olla_fx.Plan.from_json(recomputed.to_json()).checkpointed_operators
        == recomputed.checkpointed_operators
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_own_loop_needs_no_more_memory_than_eager_with_checkpoints(dropout):
    x, y = batches(1)[0]
    pair = OwnLoop(Blocks(dropout), x).run(batches(3))

    def backward(called, optimizer):
        optimizer.zero_grad()
        with record_events() as recorded:
            F.cross_entropy(called(x), y).backward()
        return baseline_from_events(recorded.events).live_peak_bytes

    eager, planned = (backward(side.called, side.optimizer) for side in pair.sides())
    assert planned <= eager
    assert pair.step.plan.peak_bytes < OwnLoop(Blocks(dropout, "plain"), x).step.plan.peak_bytes / 1.5


class DroppedHidden(nn.Module):
    """Drops where a block is widest, which is where a step with checkpoints needs most."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(6)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_a_recomputed_dropout_needs_no_more_than_eagers():
    rows = [(x.repeat(8, 1), y.repeat(8)) for x, y in batches(3)]
    pair = OwnLoop(DroppedHidden(), rows[0][0]).run(rows)
    pair.assert_served()

    def step(side):
        side.optimizer.zero_grad()
        with record_events() as recorded:
            F.cross_entropy(side.called(rows[0][0]), rows[0][1]).backward()
        stock = [event for event in recorded.events if not event.served]
        return baseline_from_events(stock).live_peak_bytes

    eager, planned = (step(side) for side in pair.sides())
    assert planned + pair.step.plan.buffer_bytes <= eager


def test_reentrant_checkpointing():
    model = Changed(lambda self, x: checkpoint(self.body, x, use_reentrant=True), head=nn.Linear(3, 3))
    model.habit = lambda self, x: self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=True))
    refused(model, r"loses the gradient of body\.0\.bias .*use_reentrant=False")
