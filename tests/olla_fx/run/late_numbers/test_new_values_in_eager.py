"""New values of a number run in eager until a plan for all of them is worth its making."""

import logging

import torch.nn.functional as F

from tests.olla_fx.harness import WholeStep, assert_served
from tests.olla_fx.helpers import sgd
from tests.olla_fx.run.late_numbers.scaled import VECTORS, Scaled, anneal, checks_type, use_beta


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
        runs, step = eager_runs(checks_type, anneal, beta=0.5)
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
