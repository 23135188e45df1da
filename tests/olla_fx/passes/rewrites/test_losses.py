"""Losses over many classes in parts: what is changed, where, and the same bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.passes.rewrites import loss_gradients
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import MOMENTUM, sgd

CLASSES = 301
IGNORED = -100


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(loss_gradients, "LEAST_PART_BYTES", 4096)


class Language(nn.Module):
    """Predicts tokens; with labels it returns the loss."""

    def __init__(self, *, tied=False, bias=False, upcast=False, reduction="mean", **options):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.upcast, self.reduction, self.options = upcast, reduction, options

    def forward(self, tokens, labels=None):
        logits = self.head(torch.tanh(self.middle(self.table(tokens))))
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits, labels):
        logits = logits.float() if self.upcast else logits
        given = logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(*given, reduction=self.reduction, **self.options)
        return (loss * 0.5).sum() if self.reduction == "none" else loss


def sentences(count=3, shape=(5, 13), ignored=IGNORED):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        tokens = torch.randint(CLASSES, shape, generator=generator)
        labels = torch.randint(CLASSES, shape, generator=generator)
        batches.append((tokens, labels.masked_fill(labels % 5 == 0, ignored)))
    return batches


def changed(step):
    return {change.rewrite for change in step.plan.changes}


def whole_step(model, batches, optimizer=sgd, **options):
    return WholeStep(model, optimizer, batches[0], model.loss, **options).run(batches)


class WithLoss(nn.Module):
    """Returns the loss alone, as a loop of one's own wants it."""

    def __init__(self, model, returns_logits=False):
        super().__init__()
        self.model, self.returns_logits = model, returns_logits

    def forward(self, tokens, labels):
        if self.returns_logits:
            logits = self.model(tokens)
            return self.model.loss(logits, labels), logits
        return self.model(tokens, labels)


def own_loop(model, batches, **options):
    first = lambda answer, _: answer[0] if isinstance(answer, tuple) else answer  # noqa: E731
    batches = [(tokens, labels, labels) for tokens, labels in batches]
    return OwnLoop(model, batches[0][:2], loss_fn=first, **options).run(batches)


FORMS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "weighted": {"weight": torch.rand(CLASSES)},
    "ignored": {"ignore_index": 3},
    "tied": {"tied": True, "bias": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_over_log_probabilities(form):
    batches = sentences(ignored=FORMS[form].get("ignore_index", IGNORED))
    pair = whole_step(Language(**FORMS[form]), batches)
    assert "loss_gradients" in changed(pair.step)
    own_loop(WithLoss(Language(**FORMS[form])), batches)


@pytest.mark.parametrize("upcast", [True, False])
def test_gradients_over_log_probabilities_in_16_bits(upcast):
    pair = whole_step(Language(upcast=upcast).bfloat16(), sentences())
    assert "loss_gradients" in changed(pair.step)


def test_a_loop_that_gets_logits_and_goes_back_twice():
    model = WithLoss(Language(), returns_logits=True)
    batch = sentences(1)[0]
    pair = own_loop(model, sentences())
    assert "loss_gradients" in changed(pair.step)

    def twice(called, model):
        loss, logits = called(*batch)
        loss.backward(retain_graph=True)
        (2 * loss + logits.mean()).backward()
        return loss.detach()

    pair.zero_grad()
    pair.run_loop(twice)


def test_a_loss_needs_one_array_of_its_logits_size():
    """Without the rewrite, log-probabilities and a gradient of theirs are there at once."""
    batches = sentences(1, shape=(16, 64))
    logits_bytes = batches[0][0].numel() * CLASSES * 4
    peaks = []
    for rewrites in ("all", "none"):
        model = Language()
        peaks.append(WholeStep(model, sgd, batches[0], model.loss, rewrites=rewrites).step.plan.peak_bytes)
    assert peaks[0] < 1.3 * logits_bytes
    assert 2 * logits_bytes < peaks[1]


def test_log_probabilities_that_something_else_reads():
    class Both(Language):
        def loss(self, logits, labels):
            values = logits.flatten(0, 1).log_softmax(-1)
            return F.nll_loss(values, labels.flatten()) + (values.exp() * values).sum() * 0.01

    pair = whole_step(Both(), sentences(), MOMENTUM)
    assert "loss_gradients" not in changed(pair.step)
