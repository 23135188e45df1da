"""Values that no guard looks at are read once; ``step.replan()`` makes a change of it known."""

import importlib.util
import types

import pytest
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import Written, mlp, sgd, vectors

settings = types.ModuleType("settings")


@pytest.fixture(params=["a global variable of an installed package", "an attribute of a Python module"])
def source(request, tmp_path, monkeypatch):
    """Return a module that holds a rate of 2.0, and a model that reads it."""
    if request.param == "an attribute of a Python module":
        monkeypatch.setattr(settings, "rate", 2.0, raising=False)
        return settings, Written(lambda model, x: model.body(x) * settings.rate, body=mlp())
    path = tmp_path / "site-packages" / "rates.py"
    path.parent.mkdir()
    path.write_text("rate = 2.0\n\n\ndef scaled(x):\n    return x * rate\n")
    spec = importlib.util.spec_from_file_location("rates", path)
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    scaled = package.scaled
    return package, Written(lambda model, x: scaled(model.body(x)), body=mlp())


def test_a_whole_step_is_planned_again(source):
    package, model = source
    pair = WholeStep(model, sgd, vectors(1)[0]).run(vectors(2))
    expected = pair.train_eager(vectors(1)[0])
    package.rate = 3.0
    assert_same(expected, pair.step(*vectors(1)[0]), "answer before replan()")
    pair.replan()
    assert pair.step.stats.cached_plans == 0
    pair.run(vectors(3))
    assert (pair.step.stats.cached_plans, pair.step.stats.replans) == (1, 0)


def test_an_own_loop_is_planned_again(source):
    package, model = source
    x, y = vectors(1)[0]
    pair = OwnLoop(model, x).run(vectors(2))
    pair.zero_grad()
    answers = [pair.eager(x)]
    package.rate = 3.0
    answers.append(pair.step(x))
    assert_same(*(answer.detach() for answer in answers), "answer before replan()")
    pair.replan()  # the backward that is still to come runs by the old plan
    for answer in answers:
        F.cross_entropy(answer, y).backward()
    pair.compare_gradients()
    pair.run(vectors(3))
    pair.assert_served()
    assert (pair.step.stats.cached_plans, pair.step.stats.replans) == (1, 0)


def test_it_changes_nothing_if_nothing_changed():
    pair = WholeStep(mlp(), sgd, vectors(1)[0]).run(vectors(2))
    offsets = pair.step.plan.offsets
    pair.replan()
    pair.run(vectors(2))
    assert pair.step.plan.offsets == offsets
    assert_served(pair.step)


def test_a_changed_layer_needs_no_replan():
    """It is found by itself, and the way across the border does not get into its way."""
    pair = WholeStep(nn.Sequential(mlp(), nn.Hardtanh()), sgd, vectors(1)[0]).run(vectors(2))
    pair.change(lambda model: setattr(model[1], "max_val", 0.5))
    pair.replan()
    pair.run(vectors(2))
    pair.change(lambda model: setattr(model[1], "max_val", 0.25))
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1
