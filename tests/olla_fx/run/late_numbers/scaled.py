"""A network that uses numbers of its own, and a loop that changes them."""

import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import mlp, sgd, vectors

VECTORS = vectors(8)


class Scaled(nn.Module):
    """A network that uses numbers of its own; what it does with them is given."""

    def __init__(self, use, **numbers):
        super().__init__()
        self.net, self.use = mlp(), use
        for name, number in numbers.items():
            setattr(self, name, number)

    def forward(self, x):
        return self.use(self, self.net(x))


def train(module, change, *, own_loop=True, steps=8, every=1, **options):
    """Train with a change after every, or every second, step; return the pair."""
    if own_loop:
        pair = OwnLoop(module, VECTORS[0][:1], **options)
    else:
        pair = WholeStep(module, sgd, VECTORS[0], **options)
    for index, batch in enumerate(VECTORS[:steps]):
        pair.train(batch)
        if index % every == every - 1:
            pair.change(lambda model, index=index: change(model, index))
    pair.compare()
    assert_served(pair.step)
    return pair


def anneal(model, index):
    model.beta = model.beta * 0.9


def count(model, index):
    model.beta += 1


def checks_type(m, y):
    return y * m.beta if isinstance(m.beta, float) else y + m.beta


def annealed(**numbers):
    return Scaled(lambda m, y: F.dropout(y, 0.5) * m.beta, **{"beta": 0.5, **numbers})


def use_beta(m, y):
    return y * m.beta
