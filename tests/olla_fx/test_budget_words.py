"""What plans with a memory budget tell: nothing that is true of one thing is said of another."""

from dataclasses import replace

import pytest
import torch.nn.functional as F

import olla_fx
from olla_fx import budget_answers, within_budget
from olla_fx.budget_answers import Sequences
from olla_fx.memory_budget import MemoryBudget
from olla_fx.within_budget import BudgetedStep
from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends
from tests.olla_fx.budgets import RUNS, batches, network, plan
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import images, sgd


@pytest.fixture
def searches(monkeypatch):
    """Count the longer searches, and make them short."""
    for module in (within_budget, budget_answers):
        monkeypatch.setattr(module, "EFFORT", 1.0)
    count, search = [], Sequences.lowest

    def counted(self, deadline):
        count.append(deadline)
        return search(self, deadline)

    monkeypatch.setattr(Sequences, "lowest", counted)
    return count


def test_a_budget_that_is_missed_is_searched_once_and_told_as_missed(searches):
    """It was kept as long as no workspaces were known; more of them do not make room."""
    examples = images(RUNS, batch=8, size=24)
    loop = OwnLoop(network(channels=16), examples[0][0], memory_budget=1_488_000)
    assert loop.step.plan.needed_bytes <= 1_488_000
    searches.clear()
    with pytest.warns(RuntimeWarning, match="no plan within the memory budget of") as warned:
        loop.run(examples)
    assert len(warned) == len(searches) == 1
    told = loop.step.plan
    assert told.workspaces_recorded
    assert told.needed_bytes > told.memory_budget_bytes
    rows = dict(told.rows())
    assert rows["memory budget kept"].startswith("no: ")
    assert "optimal" not in rows
    assert "smallest peak of these operators" in rows


@pytest.mark.parametrize(
    ("choices", "is_missed", "is_open"),
    [(0, True, True), (1, False, True), (1, True, False), (3, False, False)],
)
def test_no_choice_follows_one_that_has_found_nothing(choices, is_missed, is_open):
    planned = plan(0.7)
    too_large = replace(planned, budget=replace(planned.budget, budget_bytes=planned.needed_bytes - 1))
    step = BudgetedStep(None, (), MemoryBudget(1), choices=choices, is_missed=is_missed)
    assert step.chooses_again(too_large) is is_open
    assert step.chooses_again(planned) is (choices == 0)


def test_what_is_lower_is_told_with_workspaces_once_they_are_known():
    loop = OwnLoop(network(), batches()[0][0], memory_budget=0.75)
    told = "recomputed in backward"
    assert dict(loop.step.plan.rows())[told].endswith(" lower, workspaces apart")
    loop.run(batches())
    assert loop.step.plan.workspaces_recorded
    assert dict(loop.step.plan.rows())[told].endswith(" lower")


def test_a_solver_whose_licence_takes_small_programs_alone_is_refused_at_once(monkeypatch):
    if not backends.is_installed("gurobi"):
        monkeypatch.setattr(backends, "is_installed", lambda solver: True)
    monkeypatch.setattr(backends, "takes_any_size", lambda solver: solver != "gurobi")
    monkeypatch.setattr("olla_fx.api.compile_step", None)
    model = network()
    with pytest.raises(SolverUnavailableError, match=r"memory_budget .* Gurobi licence .* solver='highs'"):
        olla_fx.plan(
            model, batches(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()),
            solver="gurobi", memory_budget=0.5,
        )  # fmt: skip
    assert olla_fx.Options(solver="highs", memory_budget=0.5).budget is not None
