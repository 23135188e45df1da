"""Sizes that decide more than sizes: they are guarded, or stay numbers; the bits are eager's either way."""

import logging

import pytest
import torch
from torch import nn

import olla_fx
from olla_solvers.errors import OptionError
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, Written, mlp
from tests.olla_fx.run.sizes.models import (
    WORDS,
    Encoder,
    Recurrent,
    Unrolled,
    texts,
    vectors,
    word_loss,
    words,
)


@pytest.mark.parametrize("make", [Recurrent, pytest.param(Unrolled, marks=pytest.mark.slow)])
def test_a_python_loop_over_the_length_is_captured_for_each_length(make, caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")
    pair = WholeStep(make(), MOMENTUM, texts(4, 3))
    for length in (3, 5, 2, 5, 3, 2):
        pair.train(texts(4, length))
    pair.compare()
    assert pair.step.stats.families == 0
    assert sum("symbols" in message for message in caplog.messages) == 1
    assert sum("sizes stay numbers" in message for message in caplog.messages) == 1


def test_a_batch_beside_a_length_that_must_be_a_number():
    """A GRU captured before in the process decides if there is a family or a plan for each batch."""
    torch.manual_seed(0)
    pair = WholeStep(Recurrent(), ADAMW, texts(4, 6))
    for batch in (4, 7, 2, 5, 9, 3, 7, 4):
        pair.train(texts(batch, 6))
    pair.compare()
    assert pair.step.stats.families <= 1
    assert pair.step.stats.cached_plans == 6
    assert_served(pair.step)


def _two_ways(self, x):
    hidden = self.first(x)
    return self.last(torch.relu(hidden) if x.shape[0] > 8 else torch.tanh(hidden))


def test_a_branch_on_a_size_is_a_guard():
    torch.manual_seed(0)
    model = Written(_two_ways, first=nn.Linear(12, 8), last=nn.Linear(8, 5))
    pair = WholeStep(model, MOMENTUM, vectors(4))
    for batch in (4, 6, 9, 12, 7, 20, 3, 9, 6, 30, 8, 11):
        pair.train(vectors(batch))
    pair.compare()
    assert pair.step.stats.families == 2


def test_one_is_special():
    torch.manual_seed(0)
    pair = WholeStep(Encoder(), ADAMW, words(4, 9), word_loss)
    for batch, length in ((4, 9), (5, 9), (1, 9), (3, 9), (1, 9), (5, 9), (2, 9)):
        pair.train(words(batch, length))
    pair.compare()
    assert pair.step.stats.families == 1


def test_batch_and_length_that_were_equal_are_told_apart():
    torch.manual_seed(0)
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 4), word_loss)
    for batch, length in ((4, 4), (6, 6), (6, 9), (9, 6), (5, 8), (7, 7), (3, 2)):
        pair.train(words(batch, length))
    pair.compare()
    assert pair.step.stats.families == 2


def test_inputs_that_are_parts_of_larger_tensors():
    torch.manual_seed(0)
    pair = OwnLoop(Encoder(), (words(4, 9)[0],), ADAMW, word_loss)
    whole = torch.randint(WORDS, (4, 40))
    for length in (9, 12, 7, 30, 12):
        pair.train((whole[:, :length], torch.randint(WORDS, (4, length))))
        pair.train(words(4, length))
    pair.compare()
    pair.assert_served()


def _several_outputs(self, x):
    hidden = self.layer(x)
    return {"hidden": hidden, "turned": hidden.T, "part": hidden[1:], "rows": x.shape[0], "input": x[:2]}


def test_outputs_that_are_views_and_numbers():
    torch.manual_seed(0)
    pair = OwnLoop(Written(_several_outputs, layer=nn.Linear(12, 6)), torch.randn(4, 12))

    def loop(called, model):
        x = torch.randn(size[0], 12)
        outputs = called(x)
        outputs["hidden"].pow(2).mean().backward()
        return [outputs[key] for key in ("hidden", "turned", "part", "rows", "input")]

    size = [0]
    for size[0] in (4, 7, 3, 9, 12, 7):
        pair.zero_grad()
        pair.run_loop(loop)
        pair.update()
    assert pair.step.stats.families == 1
    pair.assert_served()


def test_inference():
    torch.manual_seed(0)
    lengths = (9, 12, 5, 7, 20, 3, 12)
    step = check_inference(Encoder(), [words(4, length)[:1] for length in lengths], 1)
    assert step.stats.families == 1
    assert_served(step)


@pytest.mark.parametrize(
    ("options", "recorded"), [({"rewrites": "none", "recompute": 0}, (9, 24, 5)), ({}, (9, 24, 5, 13))]
)
def test_new_sizes_are_served_at_their_first_call(options, recorded):
    """If the first plan's graph was changed for its sizes, its recording tells nothing of the family's."""
    torch.manual_seed(0)
    pair = WholeStep(Encoder(0.1, layers=2), ADAMW, words(4, 9), word_loss, **options)
    for length in recorded:
        pair.train(words(4, length))
    for length in (7, 30, 12, 40, 17, 3, 2):
        pair.train(words(4, length))
        assert_served(pair.step, 1)
        assert pair.step.plan.workspaces_recorded
    pair.compare()


def test_a_request_beyond_the_prediction_is_recorded_again():
    torch.manual_seed(0)
    pair = WholeStep(Encoder(), ADAMW, words(4, 9), word_loss)
    for length in (9, 24, 5, 13):
        pair.train(words(4, length))
    (family,) = pair.step._plans.families._families
    recorded = family.recordings._predict
    family.recordings._predict = lambda *arguments: max(1, recorded(*arguments) // 2)
    pair._check_service = lambda batch: None
    outside = []
    for length in (12, 12, 12):
        pair.train(words(4, length))
        outside.append(pair.step.stats.counts.outside > 0)
    assert outside == [True, True, False]


def test_a_model_that_changes_state_gets_other_plans():
    torch.manual_seed(0)
    pair = OwnLoop(Encoder(), (words(4, 9)[0],), ADAMW, word_loss)
    for length in (9, 12, 7):
        pair.train(words(4, length))
    pair.change(lambda model: model.head.requires_grad_(False))
    for length in (12, 7, 9):
        pair.train(words(4, length))
    pair.change(lambda model: model.head.requires_grad_(True))
    for length in (12, 20, 7):
        pair.train(words(4, length))
    pair.compare()


def test_what_dynamic_cannot_be():
    with pytest.raises(OptionError, match="dynamic"):
        olla_fx.optimize(mlp(), torch.ones(4, 6), dynamic="yes")


def test_replanning_forgets_families():
    torch.manual_seed(0)
    pair = WholeStep(mlp(12, 5), MOMENTUM, vectors(4))
    for batch in (4, 6, 3):
        pair.train(vectors(batch))
    pair.replan()
    assert pair.step.stats.families == 0
    for batch in (4, 6, 3):
        pair.train(vectors(batch))
    assert pair.step.stats.families == 1


def test_printed_code_names_sizes():
    torch.manual_seed(0)
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 9), word_loss)
    for length in (9, 12, 7, 5):
        pair.train(words(4, length))
    assert "self.size_" in pair.step.graph_module.code


def _others_alone(self, x):
    hidden = self.layer(x)
    others = ~torch.eye(x.shape[0], dtype=torch.bool)
    return (hidden @ hidden.T)[others].view(x.shape[0], -1).mean(1, keepdim=True) + hidden


def test_a_count_that_follows_from_sizes_has_a_plan_for_each(caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")
    pair = WholeStep(Written(_others_alone, layer=nn.Linear(12, 5)), MOMENTUM, vectors(4))
    for batch in (4, 6, 9, 6, 5, 9, 4):
        pair.train(vectors(batch))
    pair.compare()
    assert pair.step.stats.families == 0
    assert sum("symbols" in message for message in caplog.messages) == 1
