"""Steps whose operators are called natively: Python in their middle, errors, what is written in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx import torch_compat
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW, Written, mlp, sgd, vectors


class Refused(Exception):
    """What the operator of these tests raises."""


refuses = False


@torch.library.custom_op("olla_fx_tests::bent", mutates_args=())
def bent(x: torch.Tensor, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    if refuses:
        raise Refused("as it was told")
    return torch.sin(x) * by, (x > 0).to(x.dtype)


@bent.register_fake
def _(x, by):
    return torch.empty_like(x), torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.by = inputs[1]


def _derive(ctx, gradient, _):
    x, sign = ctx.saved_tensors
    return gradient * torch.cos(x) * ctx.by * sign, None


bent.register_autograd(_derive, setup_context=_keep)


def bending(self, x):
    values, sign = bent(self.first(x), 0.7)
    return self.second(F.dropout(values, 0.3) + sign.detach())


def halving(self, x):
    hidden = self.first(x)
    halved = hidden.detach().clone()
    halved[:, 1:].mul_(0.5)
    return self.second(hidden.relu_() + halved)


def several(self, x):
    values, places = self.first(x).topk(4, 1)
    left, right = values.split(2, 1)
    mean, variance = torch.var_mean(torch.cat([left * places[:, :2], right], 1), 1, keepdim=True)
    return self.second(F.pad(torch.rand_like(mean) * variance, (0, 5)) + x)


def product(self, x):
    return self.second(self.first(x) * self.first(x.flip(1)))


FORWARDS = [bending, halving, several, product]


def written(forward):
    return Written(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 3))


@pytest.mark.parametrize("forward", FORWARDS)
def test_whole_steps(forward):
    WholeStep(written(forward), ADAMW, vectors(1)[0]).run(vectors(20))


@pytest.mark.parametrize("forward", FORWARDS)
def test_own_loops(forward):
    pair = OwnLoop(written(forward), vectors(1)[0][0]).run(vectors(20))
    pair.assert_served()


@pytest.mark.parametrize("forward", FORWARDS)
def test_own_loops_with_two_backwards(forward):
    """Each loop settles, and its second backward finds what the first one wrote over."""
    pair = OwnLoop(written(forward), vectors(1)[0][0])
    for batch in vectors(20):
        pair.zero_grad()
        for loss in pair.losses(batch):
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        pair.compare_gradients()
        pair.update()
    pair.compare()
    told = pair.step.stats
    assert told.binding == "buffer"
    assert told.counts.served > 0
    assert not told.is_busy


def test_backwards_that_all_keep_their_graph():
    """The recorded run ends with its first backward, since nobody knows which is the last."""
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for batch in vectors(5):
        pair.zero_grad()
        for loss in pair.losses(batch):
            for _ in range(3):
                loss.backward(retain_graph=True)
        del loss
        pair.compare_gradients()
        pair.update()
    assert pair.step.stats.counts.served > 0
    plan = pair.step.plan
    assert plan.workspaces_recorded
    pair.run(vectors(3))
    assert pair.step.plan is plan or pair.step.plan.workspaces_recorded


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "own loop"])
def test_an_error_in_the_middle_leaves_the_next_call_as_it_was(whole, monkeypatch):
    if whole:
        pair = WholeStep(written(bending), sgd, vectors(1)[0])
        pair.run(vectors(3))
        call = lambda: pair.step(*vectors(1)[0])  # noqa: E731
    else:
        pair = OwnLoop(written(bending), vectors(1)[0][0])
        pair.run(vectors(3))
        call = lambda: pair.step(vectors(1)[0][0])  # noqa: E731
    monkeypatch.setitem(globals(), "refuses", True)
    with pytest.raises(Refused, match="as it was told") as raised:
        call()
    assert any("bent" in note for note in raised.value.__notes__)
    del raised
    monkeypatch.setitem(globals(), "refuses", False)
    pair.model.load_state_dict(pair.eager.state_dict())
    pair.run(vectors(3))
    assert_served(pair.step)


def test_modes_of_the_caller_see_a_backward():
    pair = OwnLoop(mlp(), vectors(1)[0][0]).run(vectors(3))
    seen = []

    class Mode(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, y = vectors(1)[0]
    for called, _, _ in pair.sides():
        loss = F.cross_entropy(called(x), y)
        with Mode():
            loss.backward()
    pair.compare_gradients()
    assert seen.count(torch.ops.aten.mm.default) >= 2


def test_profilers_see_the_operators():
    pair = OwnLoop(mlp(), vectors(1)[0][0]).run(vectors(3))
    with torch.profiler.profile() as profile:
        pair.step(vectors(1)[0][0])
    assert "aten::addmm" in {event.name for event in profile.events()}
