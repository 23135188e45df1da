"""``dynamic=True`` makes symbols of all sizes at once; None of those that vary; False of none."""

import logging

import pytest
import torch
from torch import nn

from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, mlp
from tests.olla_fx.run.sizes.models import ConvNet, Encoder, Unrolled, texts, word_loss, words


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def rows(*batches: int):
    return [(torch.randn(batch, 6), torch.randint(3, (batch,))) for batch in batches]


@pytest.mark.parametrize(("dynamic", "families"), [(True, (1, 1)), (None, (0, 1)), (False, (0, 0))])
def test_when_sizes_become_symbols(dynamic, families):
    batches = rows(4, 4, 9, 5, 12, 7)
    pair = WholeStep(mlp(), ADAMW, batches[0], dynamic=dynamic)
    before = pair.step.stats.families
    pair.run(batches)
    assert (before, pair.step.stats.families) == families
    if dynamic is not False:
        assert_served(pair.step)


def test_another_size_is_not_captured(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = [words(*sizes) for sizes in ((4, 9), (3, 7), (5, 12), (8, 8), (2, 20), (6, 11))]
    loop = OwnLoop(Encoder(), batches[0][:1], loss_fn=word_loss, dynamic=True).run(batches)
    assert loop.step.stats.families == 1
    assert not [message for message in caplog.messages if "planning" in message]
    loop.assert_served()


def test_equal_sizes_are_one_until_they_differ():
    batches = [words(*sizes) for sizes in ((6, 6), (7, 7), (5, 12), (8, 9))]
    loop = OwnLoop(Encoder(), batches[0][:1], loss_fn=word_loss, dynamic=True).run(batches[:2])
    assert (loop.step.stats.families, loop.step.stats.cached_plans) == (1, 2)
    loop.run(batches[2:])
    assert loop.step.stats.families == 2


def test_sizes_that_the_step_needs_are_numbers():
    images = [(torch.randn(batch, 3, size, size),) for batch, size in ((4, 8), (3, 12), (5, 16), (6, 10))]
    check_inference(ConvNet(), images, None)
    batches = rows(4, 9, 1, 5, 6)
    pair = WholeStep(mlp(), ADAMW, batches[0], dynamic=True).run(batches)
    assert pair.step.stats.families == 1


def test_a_length_that_python_loops_over_is_a_number_beside_a_symbol():
    batches = [texts(batch, length) for batch, length in ((4, 2), (3, 2), (6, 2), (4, 3), (2, 2))]
    pair = WholeStep(Unrolled(), ADAMW, batches[0], dynamic=True).run(batches)
    assert (pair.step.stats.families, pair.step.stats.cached_plans) == (1, 5)


def test_what_cannot_be_dynamic_says_why(caplog):
    class RowByRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return torch.stack([self.body(x[index]) for index in range(len(x))])

    caplog.set_level(logging.INFO, "olla_fx")
    batches = rows(4, 5, 4)
    pair = WholeStep(RowByRow(), ADAMW, batches[0], dynamic=True)
    assert any(message.startswith("dynamic=True: sizes stay numbers") for message in caplog.messages)
    pair.run(batches)
    assert (pair.step.stats.families, pair.step.stats.cached_plans) == (0, 2)


def test_a_model_without_sizes_that_vary():
    batches = rows(1, 1)
    pair = WholeStep(nn.Linear(6, 3), ADAMW, batches[0], dynamic=True).run(batches)
    assert pair.step.stats.families == 0
