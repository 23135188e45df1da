"""Buffers that a model updates, and tied, frozen and reparametrised parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import ADAMW, MOMENTUM, SmallNet, Written, images, mlp, sgd, vectors


def test_tied_weights():
    model = Written(
        lambda self, x: self.out(self.embed(x)).transpose(1, 2),
        embed=nn.Embedding(10, 6),
        out=nn.Linear(6, 10, bias=False),
    )
    model.out.weight = model.embed.weight
    pair = WholeStep(model, optim.Adam, (torch.zeros(2, 5, dtype=torch.long),) * 2)
    pair.run([(torch.randint(10, (2, 5)), torch.randint(10, (2, 5))) for _ in range(4)])
    assert pair.model.out.weight is pair.model.embed.weight


def test_frozen_and_unreached_parameters_get_no_state():
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    state = pair.optimizers[1].state
    assert pair.model.head.weight in state
    assert pair.model.frozen not in state
    assert pair.model.unreached not in state


def test_a_frozen_backbone():
    model = SmallNet()
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    WholeStep(model, MOMENTUM, images(1)[0]).run(images(3))


def codebook(self, x):
    x = self.body(x)
    nearest = torch.cdist(x, self.codes).argmin(1)
    chosen = F.one_hot(nearest, 4).float()
    with torch.no_grad():
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
        self.codes /= self.counts.unsqueeze(1) + 1
        self.steps += 1
        self.last.copy_(x[0])
        self.noise.normal_()
    return x + (self.codes[nearest] - x).detach() + self.noise


def test_buffers_that_the_model_updates_itself():
    model = Written(
        codebook,
        body=mlp(),
        codes=torch.randn(4, 3),
        counts=torch.ones(4),
        steps=torch.zeros((), dtype=torch.long),
        noise=torch.zeros(3),
    )
    model.register_buffer("last", torch.zeros(3), persistent=False)
    pair = WholeStep(model, MOMENTUM, vectors(1)[0]).run(vectors(5))
    assert pair.model.steps == 5


def test_a_plain_tensor_attribute_that_the_model_updates():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = mlp(), torch.zeros(3)

        def forward(self, x):
            self.calls.add_(1)
            return self.body(x) * self.calls

    pair = WholeStep(Counting(), MOMENTUM, vectors(1)[0]).run(vectors(3))
    assert_same(pair.eager.calls, pair.model.calls, "calls")


@pytest.mark.parametrize(
    "update",
    [
        lambda table: table.copy_(table.index_put((torch.tensor([1, 2, 0]),), table)),
        lambda table: table.copy_(torch.addmm(table, table, table)),
        lambda table: table.mul_(table),
        lambda table: table.copy_(table.t().clone()),
        lambda table: table.copy_(table + table.t()),
        lambda table: table[1:].copy_(table[:-1].clone()),
        lambda table: table.copy_(table.cumsum(0)),
        lambda table: table.sub_(table.mean()),
    ],
    ids=["index_put", "addmm", "mul", "transpose", "add transposed", "shift", "cumsum", "mean"],
)
def test_buffers_updated_from_themselves(update):
    def forward(self, x):
        with torch.no_grad():
            update(self.table)
        return self.body(x) + self.table.sum()

    WholeStep(Written(forward, body=mlp(), table=torch.rand(3, 3) / 4), MOMENTUM, vectors(1)[0]).run(
        vectors(4)
    )


def test_mixed_training_flags():
    model = SmallNet()
    model.norm.eval()
    WholeStep(model, MOMENTUM, images(1)[0]).run(images(3))


def normalized(wrap):
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_reparametrised_weights(wrap):
    """These modules cannot be copied."""
    WholeStep(normalized(wrap), sgd, vectors(1)[0], eager=normalized(wrap)).run(vectors(4))
