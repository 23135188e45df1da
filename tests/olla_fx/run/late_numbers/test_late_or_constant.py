"""Python numbers that a loop changes become inputs of the graph, unless they decide more than results."""

import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.run.late_numbers.scaled import VECTORS, Scaled, anneal, checks_type, count, train

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


def _formats(m, y):
    assert f"{m.beta:.2f}"
    return y * m.beta


def _looks_up(m, y):
    return y * {0.5: 1.0}.get(m.beta, 2.0)


CONSTANT = {
    "isinstance": (checks_type, 0.5, anneal),
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
