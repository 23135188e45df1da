"""Plain values that a forward notes on its model, the first time or every time, are written as in eager."""

import copy

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import mlp, vectors


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
