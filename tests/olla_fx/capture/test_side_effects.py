"""Side effects of a forward or a loss are followed or refused with the cause."""

import collections
import copy
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.capture.refusals import Changed, Counter, refused
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


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


class Settings:
    """What a model looks up."""

    def __init__(self):
        self.kind = None


class Noting(nn.Module):
    """Notes something the first time that it runs."""

    def __init__(self, note):
        super().__init__()
        self.body = mlp()
        self.settings = Settings()
        self.note = note

    def forward(self, x):
        answer = self.note(self, self.body(x))
        return answer * 2 if self.settings.kind == "pairs" else answer


def note_in_settings(model, answer):
    if model.settings.kind is None:
        model.settings.kind = "pairs" if answer.shape[1] == 2 else "many"
    return answer


def note_in_attributes(model, answer):
    if not hasattr(model, "classes"):
        model.classes, model.settings.kind = answer.shape[1], "many"
    return answer


def note_and_differ(model, answer):
    if model.settings.kind is None:
        model.settings.kind = "many"
        return answer + 1
    return answer


def note_list(model, answer):
    if model.settings.kind is None:
        model.settings.kind = [answer.shape[1]]
    return answer


_seen: dict[str, bool] = {}


class NotingGlobally(Noting):
    def forward(self, x):
        _seen["forward"] = True
        self.settings.kind = "many"
        return self.body(x)


@pytest.mark.parametrize("note", [note_in_settings, note_in_attributes])
def test_what_only_a_first_forward_writes_is_written_by_the_first_call(note):
    model, (x, target) = Noting(note), vectors(1)[0]
    before = copy.deepcopy(vars(model.settings)), {*vars(model)}
    olla_fx.plan(model, x)
    pair = OwnLoop(model, x)
    assert (vars(model.settings), {*vars(model)}) == before
    for _ in range(3):
        pair.train((x, target))
        assert model.settings.kind == pair.eager.settings.kind == "many"
        assert getattr(model, "classes", 3) == 3
    pair.assert_served()
    assert (pair.step.stats.cached_plans, pair.step.stats.replans) == (1, 0)
    pair.change(lambda model: setattr(model.settings, "kind", "pairs"))
    pair.train((x, target))
    assert pair.step.stats.replans == 1
    pair.change(lambda model: setattr(model.settings, "kind", None))
    pair.change(lambda model: vars(model).pop("classes", None))
    pair.train((x, target))
    assert model.settings.kind == "many"
    assert pair.step.stats.cached_plans == 2


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (note_and_differ, "computes something else after it wrote its attribute 'settings.kind'"),
        (note_list, "changes its attribute 'settings'"),
    ],
)
def test_what_a_first_forward_changes_beside_plain_values_is_refused(note, message):
    with pytest.raises(CaptureError, match=message):
        olla_fx.optimize(Noting(note), vectors(1)[0][0])


def test_a_global_variable_that_a_first_forward_writes_is_refused():
    _seen.clear()
    with pytest.raises(CaptureError, match=r"changes its attribute '.*_seen'"):
        olla_fx.optimize(NotingGlobally(None).eval(), vectors(1)[0][0])


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
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_tensor_that_forward_replaces_is_refused(update, name, mode):
    model, (x, target) = Averaging(update), vectors(1)[0]
    plan = {
        "training": lambda: WholeStep(model, sgd, (x, target)),
        "inference": lambda: olla_fx.optimize(model.eval(), (x,), solver="none", fallback="raise"),
        "own loop": lambda: olla_fx.optimize(model.train(), (x,), solver="none", fallback="raise"),
    }[mode]
    with pytest.raises(CaptureError, match=f"(?s)'{name}'.*copy_, mul_"):
        plan()


class Reshaping(nn.Module):
    """Changes the shape or the memory of one of its tensors in a way of choice."""

    def __init__(self, change):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.register_buffer("kept", torch.arange(36.0).view(6, 6))
        self.loose = torch.arange(36.0).view(6, 6)
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return self.body(x.view(-1, 6)) + self.kept.sum(0) + self.loose.sum(0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model, x: x.unsqueeze_(0), "input 0"),
        (lambda model, x: x.resize_(4, 9), "input 0"),
        (lambda model, x: x.set_(torch.zeros(6, 6)), "input 0"),
        (lambda model, x: setattr(x, "data", torch.zeros(6, 6)), "input 0"),
        (lambda model, x: model.kept.t_(), "buffer 'kept'"),
        (lambda model, x: model.kept.set_(torch.zeros(6, 6)), "buffer 'kept'"),
        (lambda model, x: model.loose.as_strided_((3, 6), (6, 1)), "attribute 'loose'"),
        (lambda model, x: torch.no_grad()(model.body.weight.t_)(), "parameter 'body.weight'"),
    ],
    ids=["unsqueeze_", "resize_", "set_", "data", "t_", "buffer set_", "as_strided_", "parameter"],
)
@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_tensor_that_forward_gives_another_shape_or_memory_is_refused(change, name, mode):
    """The graph would compute with the new shape, and the caller's tensor would keep the old one."""
    model, x = Reshaping(change), torch.ones(6, 6)
    plan = {
        "training": lambda: WholeStep(model, sgd, (x, torch.ones(6, 6)), F.mse_loss),
        "inference": lambda: olla_fx.optimize(model.eval(), x, solver="none"),
        "own loop": lambda: olla_fx.optimize(model.train(), x, solver="none"),
    }[mode]
    with pytest.raises(CaptureError, match=f"{name} another shape or other memory"):
        plan()
    assert x.shape == model.kept.shape == (6, 6)


def test_a_change_of_shape_that_forward_takes_back_is_followed():
    model = Reshaping(lambda model, x: (model.kept.t_().mul_(2), model.kept.t_()))
    WholeStep(model, sgd, (torch.ones(6, 6), torch.ones(6, 6)), F.mse_loss).run(
        [(torch.ones(6, 6), torch.ones(6, 6))] * 3
    )


def test_a_tensor_that_forward_writes_is_followed():
    WholeStep(Averaging(lambda model, mean: model.ema.mul_(0.9).add_(mean)), sgd, vectors(1)[0]).run(
        vectors(3)
    )


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
        WholeStep(Advancing(source, draw), sgd, vectors(1)[0])


@pytest.mark.parametrize(
    "seed",
    [lambda _: torch.manual_seed(3).initial_seed(), lambda _: torch.random.seed()],
    ids=["manual", "seed"],
)
def test_seeding_within_forward_is_refused(seed):
    functions = torch.manual_seed, torch.random.seed
    with pytest.raises(CaptureError, match="seeds torch's random numbers"):
        WholeStep(Advancing(None, seed), sgd, vectors(1)[0])
    assert functions == (torch.manual_seed, torch.random.seed)


def count_calls(self, x):
    self.calls += 1
    return self.body(x)


def keep_hidden(self, x):
    self.hidden = self.body(x)
    return self.hidden


def grow_history(self, x):
    self.history.append(1)
    return self.body(x)


def count_in_dict(self, x):
    self.counts["calls"] += 1
    return self.body(x) * self.counts["calls"]


def count_in_object(self, x):
    self.counter.calls += 1
    return self.body(x) * self.counter.calls


def swap_in_list(self, x):
    self.history[0] = x.mean()
    return self.body(x)


@pytest.mark.parametrize(
    ("habit", "part", "value"),
    [
        (count_calls, "calls", 0),
        (keep_hidden, "hidden", None),
        (grow_history, "history", []),
        (count_in_dict, "counts", {"calls": 0}),
        (count_in_object, "counter", Counter()),
        (swap_in_list, "history", [0]),
    ],
)
def test_side_effects(habit, part, value):
    refused(Changed(habit, **{part: value}), f"changes its attribute '{part}.*registered buffer")


def test_a_tensor_in_a_container_that_is_written_to():
    def habit(self, x):
        self.kept[0].add_(1)
        return self.body(x) * self.kept[0]

    refused(Changed(habit, kept=[torch.zeros(3)]), "kept|container|buffer")


def test_a_parameter_that_hides_in_a_list_is_trained_or_refused():
    model = Changed(lambda self, x: F.linear(self.body(x), self.weights[0]), own=nn.Linear(3, 3, bias=False))
    model.weights = [model.own.weight]
    refused(model, r"own\.weight")


class CountingLoss(nn.Module):
    calls = 0

    def forward(self, answer, target):
        self.calls += 1
        return F.cross_entropy(answer, target) * self.calls


class RememberingLoss:
    def __init__(self):
        self.calls = []

    def __call__(self, answer, target):
        self.calls.append(1)
        return F.cross_entropy(answer, target)


@pytest.mark.parametrize(
    ("make_loss", "said"), [(CountingLoss, "calls"), (RememberingLoss, "RememberingLoss.calls")]
)
def test_losses_with_side_effects(make_loss, said):
    loss_fn = make_loss()
    refused(mlp(), said, loss_fn=loss_fn)
    assert not loss_fn.calls


class Marking(nn.Module):
    """Notes at every call what it was called for."""

    def __init__(self, mark):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.noted = None
        self.scale = 1.0
        self._mark = mark

    def forward(self, x):
        self.noted = self._mark(self, x)
        return self.body(x).relu() * self.scale


def mark_mode(model, x):
    return "training" if model.training else "evaluation"


def mark_size(model, x):
    return x.shape[0]


def mark_answer(model, x):
    return bool((x > 5).any())


def mark_number(model, x):
    return model.scale * 2


@pytest.mark.parametrize("fallback", ["eager", "raise"])
@pytest.mark.parametrize("mark", [mark_mode, mark_size, mark_answer, mark_number])
def test_what_each_forward_notes_anew(mark, fallback):
    """A capture that finds its note there already does not show that it writes it."""
    model = Marking(mark)
    eager = copy.deepcopy(model)
    x = torch.rand(3, 4)
    planned = olla_fx.optimize(model, x, solver="none", fallback=fallback)
    changes = {
        mark_mode: lambda model, turn: model.train(turn % 3 != 2),
        mark_number: lambda model, turn: setattr(model, "scale", (1.0, 0.5, 0.25)[turn % 3]),
    }
    for turn in range(12):
        batch = torch.rand((3, 3, 5)[turn % 3] if mark is mark_size else 3, 4)
        if mark is mark_answer and turn % 4 > 1:
            batch[0, 0] = 9.0
        if turn == 8:
            model.noted = eager.noted = "other"
        for half in (model, eager):
            changes.get(mark, lambda model, turn: None)(half, turn)
        outputs = [called(batch) for called in (eager, planned)]
        assert_same(*outputs, "outputs")
        for output in outputs:
            output.sum().backward()
        assert model.noted == eager.noted
