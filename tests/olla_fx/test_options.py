"""Options: checked once, given as one object or by keyword."""

import dataclasses

import pytest
import torch

import olla_fx
from olla_fx import Options
from olla_fx.options import changed_options
from olla_solvers.errors import OptionError, SolverUnavailableError
from tests.olla_fx.helpers import mlp
from tests.olla_fx.transfers import swapping


@pytest.mark.parametrize(
    "values",
    [
        {"accumulation_steps": 0},
        {"accumulation_steps": True},
        {"accumulation_steps": 2.0},
        {"cache_size_limit": 0},
        {"cache_size_limit": None},
        {"clip_grad_norm": 0.0},
        {"clip_grad_norm": True},
        {"clip_grad_value": -1},
        {"time_limit": -1.0},
        {"time_limit": float("nan")},
    ],
)
def test_values_without_a_meaning_are_refused_by_name(values):
    with pytest.raises(OptionError, match=next(iter(values))):
        Options(**values)


def test_an_unknown_solver_is_refused():
    with pytest.raises(SolverUnavailableError, match="cplex"):
        Options(solver="cplex")


def test_an_unknown_option_names_a_similar_one():
    with pytest.raises(OptionError, match="did you mean accumulation_steps"):
        olla_fx.plan(mlp().eval(), torch.ones(4, 6), accumulation_step=2)
    with pytest.raises(OptionError, match="one of solver, time_limit"):
        olla_fx.optimize(mlp().eval(), torch.ones(4, 6), mode="inference", fallback="raise")


def test_options_are_no_dictionary():
    with pytest.raises(OptionError, match="not a dict"):
        olla_fx.plan(mlp().eval(), torch.ones(4, 6), options={"solver": "none"})


def test_keywords_change_an_options_object():
    options = Options(solver="none", time_limit=3)
    assert changed_options(options, {"time_limit": 4}) == Options(solver="none", time_limit=4)
    assert changed_options(None, {}) == Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.solver = "cbc"


@pytest.mark.parametrize(
    "values", [{"accumulation_steps": 2}, {"clip_grad_norm": 1.0}, {"clip_grad_value": 1}]
)
def test_only_accumulation_and_clipping_change_gradients(values):
    assert Options(**values).changes_gradients
    assert not Options(solver="none", cuda_graph=True, return_outputs=True).changes_gradients


def test_an_object_and_keywords_plan_alike():
    model, x = mlp().eval(), torch.ones(4, 6)
    by_object = olla_fx.plan(model, x, options=Options(solver="none"))
    by_keyword = olla_fx.plan(model, x, solver="none")
    assert (by_object.order, by_object.offsets) == (by_keyword.order, by_keyword.offsets)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_chunks": 1}, "at least 2"),
        ({"loss_chunks": True}, "at least 2"),
        ({"loss_chunks": "8"}, "at least 2"),
        ({"loss_chunks": 8, "rewrites": "none"}, "needs the rewrite chunked_loss"),
    ],
)
def test_chunks_of_losses_are_a_number_and_a_rewrite(values, words):
    with pytest.raises(OptionError, match=words):
        Options(**values)
    assert Options(loss_chunks=2, rewrites="chunked_loss").loss_chunks == 2


def test_swapping_goes_with_neither_cuda_graphs_nor_a_budget():
    for other in ({"cuda_graph": True}, {"memory_budget": 0.7}):
        with pytest.raises(OptionError, match=r"leave .* out|Leave one of them out"):
            Options(swap=swapping(), **other)
    for swap in ("maybe", 1, 0, None):
        with pytest.raises(OptionError, match=f"swap is True, False or 'auto', not {swap!r}"):
            Options(swap=swap, memory_budget=0.5)
    with pytest.raises(OptionError, match="swap=True says how a memory budget may be kept"):
        Options(swap=True)
    with pytest.raises(OptionError, match="link says how fast arrays are swapped"):
        Options(link="16GB/s")
    with pytest.raises(OptionError, match="link is bytes in a second"):
        Options(link="16 apples/s", memory_budget=0.5)
