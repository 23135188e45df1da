"""Capturing leaves numbers as they were, and what a step writes to them is eager's or refused."""

import copy

import pytest
import torch

import olla_fx
from tests.olla_fx.run.late_numbers.scaled import VECTORS, Scaled, annealed


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
