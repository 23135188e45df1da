"""Masks are drawn again from the generator's state, where a budget needs their memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import draws
from olla_fx.fx_graph import draws_random_numbers
from tests.olla_fx.helpers import sgd


def test_a_budget_is_met_by_drawing_again():
    layers = [(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*(layer for group in layers for layer in group), nn.Linear(16, 5))
    plan = olla_fx.plan(
        model,
        (torch.randn(8192, 16), torch.randint(5, (8192,))),
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        memory_budget=0.35,
        rewrites="none",
        device_profile="a100",
        baseline=False,
    )
    assert plan.needed_bytes <= plan.memory_budget_bytes
    assert any("dropout_mask" in array.name for array in plan.recomputed.arrays)


@pytest.mark.parametrize("original", [op for op in draws.DRAWN_AGAIN if "attention" not in str(op)], ids=str)
def test_what_was_drawn_is_drawn_again_and_the_generator_is_left_alone(original):
    like = torch.rand(40, 30)
    name = str(original.overloadpacket)
    arguments = {
        "olla_fx.dropout_mask": ((40, 30), (30, 1), 0.3, like.device),
        "aten.native_dropout": (like, 0.3, True),
        "aten.rand": ((40, 30),),
        "aten.randn": ((40, 30),),
        "aten.bernoulli": (like, 0.3) if original._overloadname == "p" else (like,),
    }.get(name, (like,))
    torch.manual_seed(5)
    torch.rand(3)
    state = draws.random_state(like.device)
    first = original(*arguments)
    torch.randn(7)
    after = torch.get_rng_state()
    again = draws.DRAWN_AGAIN[original](state, like.device, *arguments)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_a_draw_that_fails_leaves_the_generator_alone():
    state = draws.random_state(torch.device("cpu"))
    torch.rand(3)
    after = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="p"):
        draws.DRAWN_AGAIN[torch.ops.aten.bernoulli.p](state, torch.device("cpu"), torch.ones(2), 2.0)
    assert torch.equal(torch.get_rng_state(), after)


def test_attention_draws_only_if_it_drops():
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    for arguments, kwargs, is_random in (
        ((q, q, q), {}, False),
        ((q, q, q, 0.0, True), {}, False),
        ((q, q, q, 0.1), {}, True),
        ((q, q, q), {"dropout_p": 0.1}, True),
    ):
        assert draws_random_numbers(graph.call_function(attention, arguments, kwargs)) == is_random
