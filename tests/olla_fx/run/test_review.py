"""Changes that a captured step would miss: each is followed, or refused with the cause."""

import collections
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError, StepInputError
from tests.olla_fx.helpers import Twins, check_inference, mlp, sgd, vectors


def change(twins, what):
    for model in (twins.eager, twins.planned):
        what(model)
    twins.calls = 0


class Averaging(nn.Module):
    """Updates an average in a way of choice."""

    def __init__(self, update):
        super().__init__()
        self.body = mlp()
        self.register_buffer("ema", torch.zeros(6))
        self.loose = torch.zeros(6)
        self.weight = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.update = update

    def forward(self, x):
        self.update(self, x.mean(0))
        return self.body(x + self.ema + self.loose + self.weight)


def replace_buffer(model, mean):
    model.ema = model.ema * 0.9 + 0.1 * mean


def replace_loose(model, mean):
    model.loose = model.loose * 0.9 + 0.1 * mean


def replace_parameter(model, mean):
    model.weight = nn.Parameter(model.weight * 0.9 + 0.1 * mean, requires_grad=False)


def replace_memory(model, mean):
    model.ema.data = model.ema * 0.9 + 0.1 * mean


def replace_memory_of_parameter(model, mean):
    model.weight.data = model.weight.data * 0.9 + 0.1 * mean


def new_buffer(model, mean):
    model.register_buffer("late", mean)


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (replace_buffer, "ema"),
        (replace_loose, "loose"),
        (replace_parameter, "weight"),
        (replace_memory, "ema"),
        (replace_memory_of_parameter, "weight"),
        (new_buffer, "late"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_tensor_that_forward_replaces_is_refused(update, name, mode):
    model, (x, target) = Averaging(update), vectors(1)[0]
    plan = {
        "training": lambda: Twins(model, sgd, (x, target)),
        "inference": lambda: olla_fx.optimize(model.eval(), (x,), solver="none"),
        "own loop": lambda: olla_fx.optimize(model.train(), (x,), solver="none"),
    }[mode]
    with pytest.raises(CaptureError, match=f"(?s)'{name}'.*copy_, mul_"):
        plan()


def test_a_tensor_that_forward_writes_is_followed():
    Twins(Averaging(lambda model, mean: model.ema.mul_(0.9).add_(mean)), sgd, vectors(1)[0]).run(vectors(3))


def dampened(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


def test_a_refused_first_call_leaves_no_optimizer_state():
    twins = Twins(mlp(), dampened, vectors(1)[0])
    weight = twins.planned[0].weight
    with torch.no_grad():
        overlapping = weight.detach().view(-1)[:24].view(4, 6)
    with pytest.raises(StepInputError, match="shares its storage"):
        twins.step(overlapping, vectors(1)[0][1])
    assert not twins.optimizers[1].state
    twins.run(vectors(3))


def test_a_first_run_that_raises_leaves_its_state_new():
    """Dampening acts from the second step on that succeeds."""
    twins = Twins(mlp(), dampened, vectors(1)[0])
    executor = twins.step._current.step.executor
    start = executor.start

    def broken(lease):
        lease.close() if hasattr(lease, "close") else None
        raise RuntimeError("interrupted")

    executor.start = broken
    with pytest.raises(RuntimeError, match="interrupted"):
        twins.step(*vectors(1)[0])
    executor.start = start
    twins.run(vectors(3))


def test_created_state_can_be_taken_back():
    twins = Twins(mlp(), dampened, vectors(1)[0])
    prologue = twins.step._current.prologue
    prologue.gather(vectors(1)[0])
    assert len(twins.optimizers[1].state) == 4
    prologue.undo_created_state()
    assert not twins.optimizers[1].state
    twins.run(vectors(3))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.free = nn.Linear(6, 6, bias=False)
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is not None:
            x = x * self.mask
        if hasattr(self, "shift"):
            x = x + self.shift
        return self.body(self.free(x))


@pytest.mark.parametrize(
    "what",
    [
        lambda model: setattr(model, "mask", torch.arange(6.0)),
        lambda model: model.register_buffer("shift", torch.arange(6.0)),
        lambda model: setattr(model.free, "bias", nn.Parameter(torch.ones(6), requires_grad=False)),
        lambda model: setattr(model.free, "bias", nn.Parameter(torch.ones(6))),
    ],
    ids=["none", "absent", "frozen bias", "bias"],
)
def test_a_tensor_that_appears_plans_again(what):
    twins = Twins(Masked(), sgd, vectors(1)[0]).run(vectors(2))
    change(twins, what)
    twins.run(vectors(2))
    assert twins.step.replans == 1


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Picky(nn.Module):
    """Reads Python values that look alike, or are hard to look into."""

    shared = 2.0

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.zero = 0.0
        self.zeros = (0.0, 1)
        self.recent = collections.deque([1.0], maxlen=3)
        self.slotted = Slotted(3.0)

    def forward(self, x):
        x = torch.copysign(x, torch.full_like(x, self.zero)) * self.zeros[1]
        x = x * torch.full_like(x, self.zeros[0]).sign().add(1.0)
        return self.body(x) * self.recent[0] * self.slotted.scale * self.shared


def share(value):
    def set_it(_model):
        Picky.shared = value

    return set_it


@pytest.mark.parametrize(
    "what",
    [
        lambda model: setattr(model, "zero", -0.0),
        lambda model: setattr(model, "zeros", (-0.0, 1)),
        lambda model: model.recent.__setitem__(0, 4.0),
        lambda model: setattr(model.slotted, "scale", 4.0),
        share(5.0),
    ],
    ids=["zero", "zero in a tuple", "deque", "slots", "class"],
)
def test_a_value_that_looks_alike_plans_again(what):
    try:
        twins = Twins(Picky(), sgd, vectors(1)[0]).run(vectors(2))
        change(twins, what)
        twins.run(vectors(2))
        assert twins.step.replans == 1
    finally:
        Picky.shared = 2.0


class Advancing(nn.Module):
    def __init__(self, source, draw):
        super().__init__()
        self.body = mlp()
        self.source = source
        self.draw = draw

    def forward(self, x):
        return self.body(x) * self.draw(self.source)


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        (itertools.count(1), next),
        (iter([1.0, 2.0, 3.0]), next),
        (itertools.cycle([1.0, 2.0]), next),
        (random.Random(1), lambda source: source.random()),
        (np.random.default_rng(1), lambda source: float(source.random())),
        (np.random.RandomState(1), lambda source: float(source.rand())),
        (torch.Generator(), lambda source: torch.rand((), generator=source)),
        (collections.deque([1.0, 2.0]), lambda source: source.popleft()),
    ],
    ids=["count", "list", "cycle", "random", "numpy", "RandomState", "torch", "deque"],
)
def test_an_iterator_that_forward_advances_is_refused(source, draw):
    with pytest.raises(CaptureError, match=r"'source'|torch\.Generator"):
        Twins(Advancing(source, draw), sgd, vectors(1)[0])


@pytest.mark.parametrize(
    "seed",
    [lambda _: torch.manual_seed(3).initial_seed(), lambda _: torch.random.seed()],
    ids=["manual", "seed"],
)
def test_seeding_within_forward_is_refused(seed):
    functions = torch.manual_seed, torch.random.seed
    with pytest.raises(CaptureError, match="seeds torch's random numbers"):
        Twins(Advancing(None, seed), sgd, vectors(1)[0])
    assert functions == (torch.manual_seed, torch.random.seed)


SCALE = 1.0


def _scale():
    return SCALE


def _inner(loss):
    return loss * _scale()


def nested_loss(answer, target):
    return _inner(F.cross_entropy(answer, target))


def comprehended_loss(answer, target):
    return sum([F.cross_entropy(answer, target) * SCALE for _ in range(1)])


def inner_lambda_loss(answer, target):
    return (lambda: F.cross_entropy(answer, target) * SCALE)()


def _closed(of):
    return lambda answer, target: of(F.cross_entropy(answer, target))


@pytest.mark.parametrize(
    "loss", [nested_loss, comprehended_loss, inner_lambda_loss, _closed(_inner)],
    ids=["nested", "comprehension", "lambda", "closure"],
)  # fmt: skip
def test_what_functions_of_the_loss_read_is_followed(loss, monkeypatch):
    twins = Twins(mlp(), sgd, vectors(1)[0], loss).run(vectors(2))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    twins.calls = 0
    twins.run(vectors(2))
    assert twins.step.replans == 1


def test_the_choice_of_attention_and_determinism_plan_again():
    step = check_inference(mlp(), [(x,) for x, _ in vectors(1)], 1)
    x = vectors(1)[0][0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step(x)
    assert step.replans == 1
    step(x)
    assert step.replans == 1  # as it was at first
    try:
        torch.use_deterministic_algorithms(True)
        step(x)
        assert step.replans == 2
    finally:
        torch.use_deterministic_algorithms(False)


class Asserting(nn.Module):
    def forward(self, x):
        assert x.shape[1] == 5, "five columns"
        return x


def test_an_example_that_fails_an_assertion_is_explained():
    with pytest.raises(CaptureError, match=r"rejects the example input.*five columns.*in eager"):
        olla_fx.optimize(Asserting().eval(), (torch.ones(2, 3),), solver="none")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def tie(model):
    model.b.weight = model.a.weight


@pytest.mark.parametrize("make", [sgd, dampened])
def test_weights_tied_after_planning_plan_again(make):
    twins = Twins(Pair(), make, vectors(1)[0]).run(vectors(2))
    change(twins, tie)
    for batch in vectors(3):
        twins.train(batch)
    for name, value in twins.eager.state_dict().items():
        assert torch.equal(value, twins.planned.state_dict()[name]), name
    assert twins.step.replans == 1


def test_weights_tied_after_planning_plan_inference_again():
    model, x = Pair().eval(), vectors(1)[0][0]
    step = check_inference(model, [(x,)], 1)
    tie(model)
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
    assert step.replans == 1


class TiedModules(Pair):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b = self.a


def test_tied_modules_may_be_tied_another_way():
    model, x = TiedModules().eval(), vectors(1)[0][0]
    step = check_inference(model, [(x,)], 1)
    model.b = model.c
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
    assert step.replans == 1


@pytest.mark.parametrize("training", [True, False])
def test_parameters_on_the_meta_device_are_refused_at_a_call(training):
    x, target = vectors(1)[0]
    if training:
        step, model, batch = (twins := Twins(mlp(), sgd, (x, target))).step, twins.planned, (x, target)
    else:
        model = mlp()
        step, batch = olla_fx.optimize(model.eval(), (x,), solver="none"), (x,)
    model.to("meta")
    with pytest.raises(StepInputError, match="meta device"):
        step(*batch)
