"""Gradients of losses in the memory of log-probabilities: what is changed, and the same bits."""

import pytest
import torch.nn.functional as F

from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import MOMENTUM, sgd
from tests.olla_fx.passes.rewrites.languages import (
    CLASSES,
    FORMS,
    IGNORED,
    Language,
    WithLoss,
    changed,
    own_loop,
    sentences,
    whole_step,
)

pytestmark = pytest.mark.usefixtures("small_parts")


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
