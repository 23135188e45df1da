"""Calls that cannot be planned run in eager for good, with one warning, or raise if errors are asked for."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError
from olla_fx.models import import_torchvision
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.helpers import ADAMW, SmallNet, images, mlp, sgd, skip_without, vectors
from tests.olla_fx.run.fallback.falling import ONE_PLAN_A_SIZE, FallingStep


class Levit(nn.Module):
    """Keeps what its attention adds from one evaluation to the next, until it is trained again."""

    def __init__(self):
        super().__init__()
        skip_without("transformers")
        import_torchvision()
        from transformers import LevitConfig, LevitForImageClassification

        sizes = {"hidden_sizes": [16] * 3, "num_attention_heads": [2] * 3, "key_dim": [8] * 3}
        self.levit = LevitForImageClassification(
            LevitConfig(image_size=64, depths=[1] * 3, num_labels=5, **sizes)
        )

    def forward(self, x):
        return self.levit(x).logits


@pytest.mark.parametrize("way", ["own loop", "whole step"])
def test_an_evaluation_that_cannot_be_planned(way):
    x, y = torch.randn(2, 3, 64, 64), torch.randint(5, (2,))
    if way == "own loop":
        pair = OwnLoop(Levit(), x, ADAMW, **ONE_PLAN_A_SIZE)
    else:
        pair = FallingStep(Levit(), ADAMW, (x, y), **ONE_PLAN_A_SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            pair.train((torch.randn_like(x), y))
            pair.change(nn.Module.eval)
            assert all(not model.training for model in (pair.eager, pair.model))
            with torch.no_grad():
                evaluated = pair.step if way == "own loop" else pair.model
                assert_same(pair.eager(x), evaluated(x), "evaluation")
            pair.change(nn.Module.train)
    pair.train((x, y))
    pair.compare()
    told = [str(warning.message) for warning in caught if "runs in eager" in str(warning.message)]
    assert len(told) == (way == "own loop")
    assert all("Levit" in message and "attention_bias_cache" in message for message in told)
    evaluations = 6 if way == "own loop" else 0
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (evaluations, 1)
    assert_served(pair.step)


def test_a_hook_that_is_added_later(make):
    pair = make().run(images(2))
    seen = []
    hooks = [model.register_forward_hook(lambda *_: seen.append(None)) for model in (pair.eager, pair.model)]
    with pytest.warns(RuntimeWarning, match="cannot be planned and runs in eager: .*hook") as caught:
        pair.run(images(6))
    assert len([warning for warning in caught if "cannot be planned" in str(warning.message)]) == 1
    assert len(seen) == 12
    for hook in hooks:
        hook.remove()
    before = pair.step.stats.eager_runs
    pair.run(images(2))
    assert pair.step.stats.eager_runs == before
    assert_served(pair.step)


def test_a_hook_that_is_added_later_if_errors_are_asked_for(make):
    pair = make(fallback="raise").run(images(2))
    pair.model.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hook"):
        pair.step(*images(1)[0][: 1 if isinstance(pair, OwnLoop) else 2])


def test_what_optimize_is_called_for_is_planned_or_refused():
    model = SmallNet()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hook"):
        olla_fx.optimize(model, images(1)[0][0])


def test_inputs_that_no_plan_can_tell_apart():
    class Settings:
        factor = 2.0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SmallNet()

        def forward(self, x, settings=None):
            return self.net(x) * (settings.factor if settings else 1.0)

    x = images(1)[0][0]
    pair = OwnLoop(Model(), x, fallback="eager")
    pair.eager.eval()
    pair.step.eval()
    with pytest.warns(RuntimeWarning, match="holds a Settings"):
        given = pair.step(x, settings=Settings())
    assert_same(pair.eager(x, Settings()).detach(), given.detach(), "outputs")


class Tagged(torch.Tensor):
    """Operators give tensors of its class."""


@pytest.mark.parametrize("mode", ["own loop", "inference", "whole step"])
def test_a_tensor_of_a_class_of_its_own(mode):
    model, (x, y) = mlp(), vectors(1)[0]
    tagged = x.as_subclass(Tagged)
    planned = {
        "own loop": lambda example: olla_fx.optimize(model, example),
        "inference": lambda example: olla_fx.optimize(model.eval(), example),
        "whole step": lambda example: olla_fx.optimize(
            model, (example, y), loss_fn=F.cross_entropy, optimizer=sgd(model.parameters())
        ),
    }[mode]
    with pytest.raises(olla_fx.StepInputError, match=r"a Tagged, .*as_subclass\(torch.Tensor\)"):
        planned(tagged)
    eager = copy.deepcopy(model)
    module = planned(x)
    with pytest.warns(RuntimeWarning, match="cannot be planned and runs in eager: an input is a Tagged"):
        answer = module(tagged, y) if mode == "whole step" else module(tagged)
    expected = F.cross_entropy(eager(tagged), y) if mode == "whole step" else eager(tagged)
    assert type(answer) is type(expected) is Tagged
    assert_same(expected.detach(), answer.detach(), "answer")
