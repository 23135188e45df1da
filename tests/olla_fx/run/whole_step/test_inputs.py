"""Inputs of a whole step: structures, shared storages, and calls that are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError, StepInputError
from olla_fx.errors import OllaError
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import WholeStep, assert_served
from tests.olla_fx.helpers import MOMENTUM, Written, mlp, sgd, vectors


def test_an_input_in_a_parameters_storage_is_refused():
    """Eager reads the weight as input in all of backward, and only then updates it; no plan knows that."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pair = WholeStep(model, sgd, (torch.ones(6, 6), torch.ones(6, 6)), F.mse_loss)
    before = copy.deepcopy(model)
    for _ in range(2):
        with pytest.raises(StepInputError, match=r"input 0 shares its storage with parameter 2\.weight"):
            pair.step(model[2].weight.detach(), torch.ones(6, 6))
        assert_same_models(before, model)
    pair.run([(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(3)])


def test_an_input_that_requires_a_gradient_is_refused():
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    x, y = vectors(1)[0]
    with pytest.raises(StepInputError, match="input 0 requires a gradient"):
        pair.step(x.requires_grad_(), y)


def test_inputs_in_one_storage():
    """They may overlap if both are only read."""

    class Sum(nn.Module):
        def __init__(self, writes):
            super().__init__()
            self.body, self.writes = mlp(), writes

        def forward(self, x, y):
            return self.body(x + (y.mul_(2) if self.writes else y))

    storage = torch.randn(5, 6)
    for writes in (False, True):
        model = Sum(writes)
        example = (torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, dtype=torch.long))
        step = olla_fx.optimize(
            model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), fallback="raise"
        )
        overlapping = (storage[:4], storage[1:], example[2])
        if writes:
            with pytest.raises(StepInputError, match="input 0 shares its storage with input 1"):
                step(*overlapping)
        else:
            step(*overlapping)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda x, y: (torch.randn(4, 7), y), CaptureError, "rejects the example input"),
        (lambda x, y: (x.double(), y), CaptureError, "float32 and float64"),
        (lambda x, y: (x, y.int()), CaptureError, "int32"),
        (lambda x, y: (x.to("meta"), y), StepInputError, "meta device"),
        (lambda x, y: (x,), CaptureError, "missing 1 required positional argument"),
        (lambda x, y: (x, y, y), CaptureError, "takes 2 positional arguments"),
        (lambda x, y: (x, {"target": y}), CaptureError, "must be Tensor, not dict"),
        (lambda x, y: (x, 3), CaptureError, "must be Tensor, not int"),
        (lambda x, y: (x, bytearray(3)), StepInputError, "holds a bytearray"),
    ],
    ids=["shape", "dtype", "target dtype", "device", "few", "many", "structure", "number", "bytes"],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_the_model_rejects(call, kind, said):
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    pair.run(vectors(2))
    before = copy.deepcopy(pair.model)
    with pytest.raises(kind, match=said):
        pair.step(*call(*vectors(1)[0]))
    assert_same_models(before, pair.model)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0


def test_lazily_conjugated_inputs():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, z):
            return self.body(z.real + z.imag)

    z, y = torch.randn(4, 6, dtype=torch.cfloat), torch.zeros(4, dtype=torch.long)
    pair = WholeStep(Parts(), sgd, (z, y))
    pair.run([(z.conj(), y), (z, y), (z.conj(), y)])
    assert_served(pair.step, 1)


@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_parameters_on_the_meta_device_are_refused_at_a_call(mode):
    model, (x, y) = mlp(), vectors(1)[0]
    if mode == "training":
        step, batch = WholeStep(model, sgd, (x, y)).step, (x, y)
    else:
        step, batch = (
            olla_fx.optimize(model.train(mode == "own loop"), x, solver="none", fallback="raise"),
            (x,),
        )
    model.to("meta")
    # A whole step sees first that the optimizer holds the parameters from before.
    with pytest.raises(OllaError, match=r"meta device|no parameter of the model"):
        step(*batch)


def test_several_inputs_and_a_nested_one():
    def forward(self, x, more):
        return self.body(x * more["scale"] + more["shift"][0]) * more["times"]

    pair = WholeStep(Written(forward, body=mlp()), MOMENTUM, example(torch.ones(4, 6)))
    pair.run([example(torch.randn(4, 6)) for _ in range(3)])


def example(x):
    return (
        x,
        {"scale": torch.full((6,), 0.5), "shift": (torch.ones(6), 3), "times": 2},
        torch.tensor([0, 1, 2, 0]),
    )


def test_the_same_tensor_twice_as_input():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    target = torch.tensor([0, 1, 2, 0])
    pair = WholeStep(model, MOMENTUM, (torch.ones(4, 6), torch.ones(4, 6), target))
    x = torch.randn(4, 6)
    for _ in range(3):
        pair.train((x, x, target))
    pair.compare()


def test_an_example_that_holds_one_tensor_twice():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    pair = WholeStep(model, MOMENTUM, (x, x, target))
    for _ in range(3):
        pair.train((x, torch.randn(4, 6), target))
    pair.compare()


def test_views_of_one_storage_as_inputs():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    base, target = torch.randn(4, 12), torch.tensor([0, 1, 2, 0])
    pair = WholeStep(model, MOMENTUM, (base[:, :6], base[:, 6:], target))
    for _ in range(3):
        other = torch.randn(4, 12)
        torch.manual_seed(0)
        expected = pair.train_eager((other[:, :6], other[:, 6:], target))
        pair.step.poison()
        assert_same(expected, pair.step(other[:, :6], other[:, 6:], target), "loss")
    assert_served(pair.step, 1)
    pair.compare()


def test_inputs_somewhere_in_a_larger_storage():
    model = Written(lambda self, x: self.body(x.as_strided((4, 6), (6, 1)) * 1), body=mlp())
    large, target = torch.randn(8, 6), torch.tensor([0, 1, 2, 0])
    pair = WholeStep(model, MOMENTUM, (large[:4], target))
    for start in range(3):
        expected = pair.train_eager((large[start : start + 4], target))
        pair.step.poison()
        assert_same(expected, pair.step(large[start : start + 4], target), "loss")
    pair.compare()


def test_an_input_that_the_model_writes_to():
    WholeStep(
        Written(lambda self, x: self.body(F.relu(x, inplace=True)), body=mlp()), MOMENTUM, vectors(1)[0]
    ).run(vectors(3))
