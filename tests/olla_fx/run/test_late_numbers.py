"""Python numbers that a loop changes become inputs of the graph, unless they decide more than results."""

import copy
import logging
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW, mlp, sgd, vectors
from tests.olla_fx.run.whole_step.clipped import ClippedStep

VECTORS = vectors(8)


class VAE(nn.Module):
    """Returns the reconstruction, and mean and logarithm of the variance of the code."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def elbo(outputs, x, weight):
    reconstruction, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(reconstruction, x) + weight * divergence


class ModuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = 0.1

    def forward(self, outputs, x):
        return elbo(outputs, x, self.weight)

    def set(self, weight):
        self.weight = weight


class ObjectLoss:
    def __init__(self):
        self.weight = 0.1

    def __call__(self, outputs, x):
        return elbo(outputs, x, self.weight)

    def compute(self, outputs, x):
        return elbo(outputs, x, self.weight)


WEIGHT = 0.1


def _global():
    def set_weight(value):
        globals()["WEIGHT"] = value

    return lambda outputs, x: elbo(outputs, x, WEIGHT), set_weight


def _closure():
    weight = 0.1

    def set_weight(value):
        nonlocal weight
        weight = value

    return lambda outputs, x: elbo(outputs, x, weight), set_weight


def _dictionary():
    settings = {"loss": {"weight": 0.1, "other": 1}, "names": ["a"]}
    return lambda outputs, x: elbo(outputs, x, settings["loss"]["weight"]), (
        lambda value: settings["loss"].update(weight=value)
    )


def _namespace():
    settings = SimpleNamespace(weight=0.1, name="vae", rates=(1, 2))
    return lambda outputs, x: elbo(outputs, x, settings.weight), (
        lambda value: setattr(settings, "weight", value)
    )


def _module():
    loss = ModuleLoss()
    return loss, lambda value: setattr(loss, "weight", value)


def _object():
    loss = ObjectLoss()
    return loss, lambda value: setattr(loss, "weight", value)


def _method():
    loss = ObjectLoss()
    return loss.compute, lambda value: setattr(loss, "weight", value)


@pytest.fixture
def weight():
    yield
    globals()["WEIGHT"] = 0.1


@pytest.mark.usefixtures("weight")
@pytest.mark.parametrize(
    "make",
    [_module, _object, _method, _closure, _global, _dictionary, _namespace],
)
def test_an_annealed_vae_is_planned_twice(make):
    loss, set_weight = make()
    batches = [(x, x) for x, _ in VECTORS]
    pair = WholeStep(VAE(), ADAMW, batches[0], loss)
    for index, batch in enumerate(batches):
        set_weight(0.1 + 0.05 * index)
        pair.train(batch)
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.replans == 1
    assert pair.step.stats.cached_plans == 2


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


LATE = {
    "temperature": (lambda m, y: y / m.beta, 2.0, anneal),
    "reciprocal": (lambda m, y: y * (1.0 / (m.beta - 0.5)), 3.0, anneal),
    "counter": (lambda m, y: y * m.beta + m.beta, 3, count),
    "warm-up": (lambda m, y: y * min(1.0, m.beta / 1000), 3, count),
    "cosine of a tensor": (lambda m, y: y * torch.cos(y * m.beta), 3.0, anneal),
    "clamp": (lambda m, y: y.clamp(-m.beta, m.beta), 0.7, anneal),
    "slope": (lambda m, y: F.leaky_relu(y, m.beta), 0.3, anneal),
    "alpha": (lambda m, y: torch.add(y, y.exp(), alpha=m.beta), 0.3, anneal),
    "mixed in place": (lambda m, y: y.clone().mul_(m.beta).add_(1 - m.beta), 0.3, anneal),
    "filled": (lambda m, y: y + torch.full_like(y, m.beta), 0.3, anneal),
    "integers": (lambda m, y: y * (m.beta // 2 + m.beta % 3), 3, count),
    "vars": (lambda m, y: y * m.beta + y * vars(m)["beta"], 0.5, anneal),
    "power": (lambda m, y: y * m.beta**2, 3.0, anneal),
    "zero": (lambda m, y: y * (m.beta * 0) + y * (m.beta - m.beta), -3.0, anneal),
    "dropped": (lambda m, y: F.dropout(y, 0.5) * m.beta, 0.3, anneal),
}


@pytest.mark.parametrize("name", LATE)
def test_a_number_that_is_only_calculated_with_is_bound_late(name):
    use, start, change = LATE[name]
    for own_loop in (True, False):
        pair = train(Scaled(use, beta=start), change, own_loop=own_loop)
        assert pair.step.stats.replans == 1


def _checks_type(m, y):
    return y * m.beta if isinstance(m.beta, float) else y + m.beta


def _formats(m, y):
    assert f"{m.beta:.2f}"
    return y * m.beta


def _looks_up(m, y):
    return y * {0.5: 1.0}.get(m.beta, 2.0)


CONSTANT = {
    "isinstance": (_checks_type, 0.5, anneal),
    "format": (_formats, 0.5, anneal),
    "text": (lambda m, y: y * len(str(m.beta)), 0.5, anneal),
    "key": (_looks_up, 0.5, anneal),
    "math": (lambda m, y: y * math.exp(m.beta), 0.5, anneal),
    "float": (lambda m, y: y * float(m.beta), 0.5, anneal),
    "floor": (lambda m, y: y * (m.beta // 0.1), 1.0, anneal),
    "tensor": (lambda m, y: y * torch.tensor(m.beta), 0.5, anneal),
    "shape": (lambda m, y: torch.cat([y, y.new_zeros(len(y), m.beta)], 1), 1, count),
    "slice": (lambda m, y: y + y[:, : m.beta].sum(), 1, count),
    "loop": (lambda m, y: sum(y * index for index in range(m.beta)), 2, count),
    "dropout": (lambda m, y: F.dropout(y, m.beta), 0.5, anneal),
    "tensor power": (lambda m, y: y.exp() ** m.beta, 0.5, anneal),
    "lerp": (lambda m, y: torch.lerp(y, y.exp(), m.beta), 0.5, anneal),
    "numpy": (lambda m, y: y * float(np.exp(m.beta)), 0.5, anneal),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_number_whose_value_decides_more_stays_a_constant(name, caplog):
    use, start, change = CONSTANT[name]
    with caplog.at_level(logging.INFO, "olla_fx"):
        pair = train(Scaled(use, beta=start), change, own_loop=False, steps=6, every=2)
    assert pair.step.stats.replans == 2
    assert sum("no inputs of the plan" in line for line in caplog.messages) == 1, "tried once"
    assert type(pair.model.beta) is type(start)


SETTINGS = {"beta": 0.5}


def test_a_number_that_reaches_the_graph_in_another_way_stays_a_constant():
    """The model's own dictionary is copied for capturing, the same one in a global variable is not."""
    model = Scaled(lambda m, y: y * m.settings["beta"] + y * SETTINGS["beta"])
    model.settings = SETTINGS
    pair = OwnLoop(model, VECTORS[0][:1])
    pair.eager.settings = SETTINGS
    for index, batch in enumerate(VECTORS[:6]):
        SETTINGS["beta"] = 0.5 + index // 2
        pair.train(batch)
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.replans == 2


def test_a_decision_by_a_number_is_taken_again_at_every_call():
    def use(m, y):
        return y * m.beta if m.beta > 0.45 else y.exp() * m.beta

    def change(model, index):
        model.beta = [0.9, 0.8, 0.3, 0.2, 0.1, 0.7, 0.4, 0.45][index]

    pair = train(Scaled(use, beta=1.0), change)
    assert pair.step.stats.replans == 3  # late above; a constant below, then late there


def test_a_decision_at_0():
    def change(model, index):
        model.beta = [0.5, 0.25, 0.0, 0.1, -0.0, 0.3, 0.0, 0.0][index]

    pair = train(Scaled(lambda m, y: y + y.exp() * m.beta if m.beta else y, beta=1.0), change)
    assert pair.step.stats.replans == 3  # late; 0.0 and -0.0 as constants


def test_several_numbers_at_once_and_one_after_the_other():
    def use(m, y):
        return y * m.beta + y.exp() * m.gamma + m.step

    def change(model, index):
        model.beta *= 0.9
        model.step += index > 2
        model.gamma *= 0.5 if index > 4 else 1.0

    pair = train(Scaled(use, beta=1.0, gamma=2.0, step=1), change)
    assert pair.step.stats.replans == 3


def test_a_number_that_changes_its_type():
    def change(model, index):
        model.beta = [1, 2, 3, 0.5, True, 0.25, 4, 2][index]

    pair = train(Scaled(lambda m, y: y * m.beta, beta=0), change)
    assert pair.step.stats.replans == 4  # int, late; 0.5, late; True


def test_infinite_numbers_are_constants():
    def change(model, index):
        model.beta = [0.5, 0.25, float("inf"), 0.1, float("nan"), 0.3, 2.0, 0.0][index]

    pair = train(Scaled(lambda m, y: y.clamp(max=m.beta) + y * (m.beta - m.beta), beta=1.0), change)
    assert pair.step.stats.replans == 3


def test_a_drop_path_rate():
    """Its random mask is drawn by a kernel that wants the rate as a constant."""

    def use(m, y):
        keep = 1 - m.beta
        return y * y.new_empty(len(y), 1).bernoulli_(keep) / keep

    pair = train(Scaled(use, beta=0.5), anneal, own_loop=False, steps=8, every=2)
    assert pair.step.stats.replans == 3


def annealed(**numbers):
    return Scaled(lambda m, y: F.dropout(y, 0.5) * m.beta, **{"beta": 0.5, **numbers})


def test_micro_batches_and_clipping():
    pair = ClippedStep(annealed(), sgd, VECTORS[0], parts=2, norm=0.5)
    for batch in VECTORS[:5]:
        pair.train(batch)
        pair.change(lambda model: anneal(model, 0))
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.replans == 1


def test_autocast():
    def context():
        return torch.autocast("cpu", torch.bfloat16)

    with context():
        pair = OwnLoop(annealed(), VECTORS[0][:1], context=context)
    for batch in VECTORS[:5]:
        pair.train(batch)
        pair.change(lambda model: anneal(model, 0))
    assert_served(pair.step)
    assert pair.step.stats.replans == 1


def test_inference():
    model = Scaled(use_beta, beta=0.5).eval()
    step = olla_fx.optimize(model, VECTORS[0][:1], solver="none", fallback="raise")
    for x, _ in VECTORS:
        model.beta *= 0.9
        with torch.no_grad():
            assert torch.equal(step(x), model(x))
    assert_served(step)
    assert step.stats.replans == 1


def test_outputs_that_are_views_of_inputs():
    def use(m, y):
        return y * m.beta

    class WithView(Scaled):
        def forward(self, x):
            return super().forward(x), x[0], self.net[0].weight[0]

    def loss(outputs, y):
        return F.cross_entropy(outputs[0], y) + outputs[2].sum()

    pair = OwnLoop(WithView(use, beta=0.5), VECTORS[0][:1], loss_fn=loss)
    for batch in VECTORS[:5]:
        pair.train(batch)
        pair.change(lambda model: anneal(model, 0))
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.replans == 1


def test_copies_bind_their_own_numbers_late():
    model = Scaled(use_beta, beta=0.5)
    step = olla_fx.optimize(model, VECTORS[0][:1], solver="none", fallback="raise")
    model.beta = 0.25
    with torch.no_grad():
        step(VECTORS[0][0])
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        for beta in (0.25, 0.5, 0.75, 1.5):
            copied.beta = beta
            with torch.no_grad():
                assert torch.equal(copied(VECTORS[0][0]), copied._model(VECTORS[0][0]))
        assert model.beta == 0.25
        assert copied.stats.replans == 1


def use_beta(m, y):
    return y * m.beta


def test_tracing_leaves_numbers_as_they_were():
    """Also if it is given up."""
    settings = {"beta": 0.5}

    def use(m, y):
        assert f"{settings['beta']:.2f}"
        return y * settings["beta"] * m.beta

    model = Scaled(use, beta=1.0)
    step = olla_fx.optimize(model, VECTORS[0][:1], solver="none", fallback="raise")
    for beta in (0.25, 0.5):
        settings["beta"], model.beta = beta, 2 * beta
        with torch.no_grad():
            assert torch.equal(step(VECTORS[0][0]), model(VECTORS[0][0]))
        assert settings == {"beta": beta}
        assert model.beta == 2 * beta


def test_a_number_that_a_step_keeps_elsewhere_stays_a_constant():
    def use(m, y):
        if m.beta < 0.5:
            m.count = m.beta
            m.beta = m.beta + 0.0
        return y * m.beta

    model, x = Scaled(use, beta=1.0), VECTORS[0][0]
    eager = copy.deepcopy(model)
    step = olla_fx.optimize(model, (x,), solver="none", fallback="raise")
    for beta in (1.0, 0.4, 0.3, 0.4, 0.4, 0.3, 1.0, 0.3):
        model.beta = eager.beta = beta
        assert torch.equal(step(x), eager(x))
        assert model.beta == beta
        assert getattr(model, "count", None) == getattr(eager, "count", None)


def test_a_step_that_changes_a_late_number_is_refused():
    def use(m, y):
        if m.beta < 0.5:
            m.beta = m.beta + 0.1
        return y * m.beta

    model = Scaled(use, beta=1.0)
    step = olla_fx.optimize(model, VECTORS[0][:1], solver="none", fallback="raise")
    model.beta = 0.1
    with pytest.raises(olla_fx.CaptureError, match="changes its attribute"):
        step(VECTORS[0][0])


def test_plans_without_late_numbers_have_the_guards_that_they_had():
    step = olla_fx.optimize(annealed(), VECTORS[0][:1], solver="none", fallback="raise")
    step(VECTORS[0][0])
    step(VECTORS[0][0])
    assert "# numbers" not in step._plans.current.prologue.source


class Asking(Scaled):
    """Asks inputs for values, too."""

    def forward(self, x, mask):
        y = self.net(x)
        if mask.all():
            y = y.exp()
        longest = int(mask.sum(1).max())
        return torch.cat([y[:, :longest] * self.beta, y[:, longest:]], 1)


def test_questions_about_inputs_beside_a_late_number():
    ones, others = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.bool)
    others[0, :2] = True
    pair = OwnLoop(Asking(None, beta=0.5), (VECTORS[0][0], ones))
    for index, (x, y) in enumerate([*VECTORS, *VECTORS]):
        pair.train((x, (ones, others)[index % 2], y))
        pair.change(lambda model: anneal(model, 0))
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.cached_plans == 4


def test_a_question_about_inputs_that_reads_a_number():
    def use(m, y):
        return y * m.beta

    class Comparing(Scaled):
        def forward(self, x):
            y = super().forward(x)
            return y if (x > self.beta + 100).any() else y.exp()

    pair = train(Comparing(use, beta=0.5), anneal, steps=6, every=2)
    assert pair.step.stats.cached_plans == 3


class FallingStep(WholeStep):
    """A whole step of which some calls run in eager: there is nothing to say of their arrays."""

    def _check_service(self, batch):
        pass


def eager_runs(use, change, **numbers):
    """Return after each step how many ran in eager, with the default fallback, and the planned module."""
    pair = FallingStep(Scaled(use, **numbers), sgd, VECTORS[0], fallback="eager")
    runs = []
    for index, batch in enumerate(VECTORS):
        pair.change(lambda model, index=index: change(model, index))
        pair.train(batch)
        runs.append(pair.step.stats.eager_runs)
    pair.compare()
    return runs, pair.step


def test_the_first_new_value_runs_in_eager_and_the_second_is_planned_for_all():
    runs, step = eager_runs(use_beta, anneal, beta=0.5)
    assert runs == [1, 1, 1, 1, 1, 1, 1, 1]
    assert step.stats.cached_plans == 2
    assert_served(step)


def test_a_constant_that_changes_runs_in_eager(caplog):
    with caplog.at_level(logging.INFO, "olla_fx"):
        runs, step = eager_runs(_checks_type, anneal, beta=0.5)
    assert runs == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sum("no inputs of the plan" in line for line in caplog.messages) == 1
    assert step.stats.cached_plans == 1


def test_a_late_number_beside_a_constant_that_changes_later():
    def use(m, y):
        return F.dropout(y * m.beta, m.p)

    def change(model, index):
        model.beta *= 0.9
        model.p = 0.5 if index < 3 else 0.2

    runs, step = eager_runs(use, change, beta=0.5, p=0.5)
    assert runs[:3] == [1, 1, 1]
    assert_served_or_eager(step)


def assert_served_or_eager(step):
    assert step.stats.counts.served > 0
