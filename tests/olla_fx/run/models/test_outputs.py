"""Outputs come in the structure and storages that the model gives them."""

import copy

import pytest
import torch
import torch.nn.functional as F

import olla_fx
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import MOMENTUM, Written, mlp, vectors


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (self.body(x), x.sum()),
        lambda self, x: {"logits": self.body(x), "hidden": [self.body[0](x), 7, None]},
        lambda self, x: (self.body(x),) * 2,
        lambda self, x: {"logits": self.body(x), "half": self.body(x)[:2]},
    ],
    ids=["tuple", "dict", "twice", "views"],
)
def test_training_returns_outputs_in_their_structure(forward):
    def loss_fn(answer, target):
        return F.cross_entropy(answer["logits"] if isinstance(answer, dict) else answer[0], target)

    model = Written(forward, body=mlp())
    storages = 3 if isinstance(forward(model, torch.ones(4, 6)), dict) else 2
    leaves = forward(model, torch.ones(4, 6))
    if isinstance(leaves, tuple) and leaves[0] is not leaves[1]:
        storages = 3
    pair = WholeStep(model, MOMENTUM, vectors(1)[0], loss_fn, return_outputs=True, outputs=storages)
    pair.run(vectors(3))


@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        (lambda self, x: (self.body(x), x.sum()), 2),
        (lambda self, x: {"logits": self.body(x), "hidden": [self.body[0](x), 7, None]}, 2),
        (lambda self, x: x.view(-1), 0),
        (lambda self, x: x, 0),
        (lambda self, x: (self.body(x), self.body[0].weight.t()), 1),
        (lambda self, x: (self.body(x), self.buffer), 1),
        (lambda self, x: self.body(x).chunk(3, 1), 1),
        (lambda self, x: (x.clone(), self.body(x).clone()), 2),
        (lambda self, x: (self.buffer.add_(1).clone(), self.buffer, self.body(x)), 2),
        (lambda self, x: (self.buffer.clone(), self.buffer.add_(1), self.body(x)), 2),
        (lambda self, x: (self.body(x).expand(5, 4, 3), torch.arange(3)), 2),
    ],
    ids=[
        "tuple", "dict", "view of the input", "the input", "view of a parameter", "a buffer",
        "two outputs in one storage", "clones", "an updated buffer", "a buffer before its update",
        "expanded, and without input",
    ],
)  # fmt: skip
def test_inference_outputs(forward, outputs):
    model = Written(forward, body=mlp(), buffer=torch.zeros(3))
    model.eval()
    eager = copy.deepcopy(model)
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none", fallback="raise")
    kept = []
    for calls, (x, _) in enumerate(vectors(3), 1):
        with torch.no_grad():
            expected = eager(x)
        step.poison()
        answer = step(x)
        assert_same(expected, answer, f"answer of call {calls}")
        assert step.stats.binding == "buffer"
        assert calls == 1 or (step.stats.counts.outputs, step.stats.counts.outside) == (outputs, 0)
        kept.append((expected, answer))
    step.poison()
    for expected, answer in kept:
        assert_same(expected, answer, "an answer kept by the caller")
    assert_same_models(eager, model)
