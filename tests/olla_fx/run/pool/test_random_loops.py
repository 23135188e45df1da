"""Loops that run several modules in any sequence: nested, crosswise, dropped, with gradients left between."""

import copy
import random

import pytest
import torch
from torch import nn

import olla_fx
from tests.olla_fx.comparisons import assert_same

STEPS = 250


class Pair:
    """A planned module, and the same in eager."""

    def __init__(self, index):
        width = 8 * (1 + index)
        self.model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
        self.eager = copy.deepcopy(self.model)
        self.planned = olla_fx.optimize(self.model, torch.randn(32, 16), solver="none", fallback="raise")

    def gradients(self):
        """Return those of both."""
        return [[parameter.grad for parameter in net.parameters()] for net in (self.eager, self.model)]


class Forward:
    """One or two modules have run, one behind the other, and wait for their backward."""

    def __init__(self, pairs):
        self.pairs = pairs
        x = torch.randn(32, 16)
        theirs = ours = x
        for pair in pairs:
            theirs, ours = pair.eager(theirs), pair.planned(ours)
        assert_same(theirs, ours, "outputs")
        self._losses = theirs.square().mean(), ours.square().mean()

    def backward(self, *, again):
        """Run the backward, or two of them."""
        for loss in self._losses:
            if again:
                loss.backward(retain_graph=True)
            loss.backward()
        for pair in self.pairs:
            assert_same(*pair.gradients(), "gradients")


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence(buffers, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pairs = [Pair(index) for index in range(draw.choice([2, 3, 4]))]
    waiting = []
    for _ in range(STEPS):
        free = [pair for pair in pairs if not any(pair in forward.pairs for forward in waiting)]
        action = draw.choice(
            ["forward", "forward", "chain", "last", "any", "infer", "drop", "clear", "poison"]
        )
        if action == "forward" and free:
            waiting.append(Forward([draw.choice(free)]))
        elif action == "chain" and len(free) > 1:
            waiting.append(Forward(draw.sample(free, 2)))
        elif action in ("last", "any") and waiting:
            forward = waiting.pop(-1 if action == "last" else draw.randrange(len(waiting)))
            forward.backward(again=draw.random() < 0.2)
        elif action == "infer" and free:
            pair, x = draw.choice(free), torch.randn(32, 16)
            with torch.no_grad():
                assert_same(pair.eager(x), pair.planned(x), "inference")
        elif action == "drop" and waiting:
            waiting.pop(draw.randrange(len(waiting)))
        elif action == "clear":
            for pair in free:
                pair.eager.zero_grad()
                pair.model.zero_grad()
        elif action == "poison" and free:
            free[0].planned.poison()
    waiting.clear()
    # In turn and to the end, so that the last run of each is one in the buffer.
    for pair in pairs * 4:
        Forward([pair]).backward(again=False)
    for pair in pairs:
        stats = pair.planned.stats
        assert (stats.binding, stats.counts.outside) == (olla_fx.Binding.BUFFER, 0)
        assert stats.counts.served > 0
        assert not stats.is_busy
