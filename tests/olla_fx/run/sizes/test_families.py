"""One captured graph serves all sizes of a step's inputs, bit for bit as eager."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import MOMENTUM, mlp
from tests.olla_fx.run.sizes.models import (
    ConvNet,
    Decoder,
    Encoder,
    images,
    vectors,
    word_loss,
    words,
)


def adamw(parameters):
    return optim.AdamW(parameters, lr=1e-2)


def in_random_order(sizes, repeats=2):
    """Every size some times, the first two at first."""
    later = [size for size in sizes for _ in range(repeats)]
    random.Random(0).shuffle(later)
    return [sizes[0], sizes[0], sizes[1], *later]


LENGTHS = [(4, length) for length in (9, 5, 7, 2, 11, 16, 30, 3)]
BATCHES_AND_LENGTHS = [(4, 9), (6, 13), (2, 9), (13, 4), (5, 5), (3, 20), (7, 7), (2, 2), (6, 9), (9, 6)]
IMAGES = [(4, size) for size in (16, 24, 12, 17, 33, 8)]
CASES = {
    "mlp": (lambda: mlp(12, 5), vectors, F.cross_entropy, [(size,) for size in (8, 5, 2, 3, 16, 31, 6, 100)]),
    "encoder, length": (lambda: Encoder(0.1), words, word_loss, LENGTHS),
    "encoder, batch and length": (lambda: Encoder(0.1), words, word_loss, BATCHES_AND_LENGTHS),
    "decoder, batch and length": (Decoder, words, word_loss, BATCHES_AND_LENGTHS),
    "convolutions, batch": (ConvNet, images, F.cross_entropy, [(size,) for size in (4, 6, 2, 9, 20, 7, 15)]),
    "convolutions, image size": (ConvNet, images, F.cross_entropy, IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("make_optimizer", [MOMENTUM, adamw], ids=["momentum", "adamw"])
def test_whole_steps(name, make_optimizer):
    make, batch, loss_fn, sizes = CASES[name]
    torch.manual_seed(0)
    pair = WholeStep(make(), make_optimizer, batch(*sizes[0]), loss_fn)
    for size in in_random_order(sizes):
        pair.train(batch(*size))
    pair.compare()
    assert pair.step.stats.families >= 1
    assert_all_of_one_family(pair.step, sizes)


@pytest.mark.parametrize("name", CASES)
def test_own_loops(name):
    make, batch, loss_fn, sizes = CASES[name]
    torch.manual_seed(0)
    pair = OwnLoop(make(), batch(*sizes[0])[:-1], adamw, loss_fn)
    for size in in_random_order(sizes):
        pair.train(batch(*size))
    pair.compare()
    assert_all_of_one_family(pair.step, sizes)


def assert_all_of_one_family(step, sizes):
    """Every size but the first has its plan from a family."""
    stats = step.stats
    assert stats.families == 1
    assert stats.cached_plans <= 1 + len(sizes)
    assert stats.replans == 0
    assert_served(step)


def test_group_norm_whose_sizes_are_values_of_the_graph():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1)
    )
    pair = OwnLoop(
        nn.Sequential(model, nn.Flatten(), nn.Linear(8, 5)), images(4, 16)[:-1], adamw, F.cross_entropy
    )
    for size in in_random_order(IMAGES):
        pair.train(images(*size))
    pair.compare()
    assert_all_of_one_family(pair.step, IMAGES)
