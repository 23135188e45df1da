"""A late number in every way to run a step, and beside questions about its inputs."""

import copy
import pickle

import torch
import torch.nn.functional as F

import olla_fx
from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.helpers import sgd
from tests.olla_fx.run.late_numbers.scaled import VECTORS, Scaled, anneal, annealed, train, use_beta
from tests.olla_fx.run.whole_step.clipped import ClippedStep


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
