"""Masks are drawn again from the generator's state, where a budget needs their memory."""

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import olla_fx
from olla_fx import draws
from olla_fx.costs.kinds import kind_of, operator_name
from olla_fx.fx_graph import IN_BACKWARD, draws_random_numbers
from olla_fx.passes.repeatable import DRAWN_AGAIN
from olla_fx.passes.repetitions import OperatorRun, repeat_operators
from tests.olla_fx.costs.nodes import node_of
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import Written, sgd
from tests.olla_fx.recomputation.dropping import Dropping

aten = torch.ops.aten
CPU = torch.device("cpu")


def arguments_of(original):
    """Arguments of an operator that draws."""
    like = torch.rand(40, 30)
    arguments = {
        "olla_fx.dropout_mask": ((40, 30), (30, 1), 0.3, CPU),
        "olla_fx.packed_dropout_mask": ((40, 30), (30, 1), 0.3),
        "aten.native_dropout": (like, 0.3, True),
        "aten.rand": ((40, 30),),
        "aten.randn": ((40, 30),),
        "aten.bernoulli": (like, 0.3) if original._overloadname == "p" else (like,),
    }
    return arguments.get(str(original.overloadpacket), (like,))


RUN_ON_THE_CPU = [original for original in DRAWN_AGAIN if "attention" not in str(original)]


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


@pytest.mark.parametrize("original", RUN_ON_THE_CPU, ids=str)
def test_what_was_drawn_is_drawn_again_and_the_generator_is_left_alone(original):
    arguments = arguments_of(original)
    torch.manual_seed(5)
    torch.rand(3)
    state = draws.random_state(CPU)
    first = original(*arguments)
    torch.randn(7)
    after = torch.get_rng_state()
    again = DRAWN_AGAIN[original](state, CPU, *arguments)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("original", RUN_ON_THE_CPU, ids=str)
def test_what_draws_again_takes_the_time_and_the_memory_of_the_first_run(original):
    arguments = arguments_of(original)
    first = node_of(original, *arguments)
    again = node_of(DRAWN_AGAIN[original], torch.get_rng_state(), CPU, *arguments)
    assert operator_name(again) == operator_name(first)
    assert kind_of(again) == kind_of(first)


def test_a_draw_that_fails_leaves_the_generator_alone():
    state = draws.random_state(CPU)
    torch.rand(3)
    after = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="p"):
        draws.DRAWN_AGAIN[aten.bernoulli.p](state, CPU, torch.ones(2), 2.0)
    assert torch.equal(torch.get_rng_state(), after)


def test_attention_draws_only_if_it_drops():
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    attention = aten._scaled_dot_product_flash_attention.default
    for arguments, kwargs, is_random in (
        ((q, q, q), {}, False),
        ((q, q, q, 0.0, True), {}, False),
        ((q, q, q, 0.1), {}, True),
        ((q, q, q), {"dropout_p": 0.1}, True),
    ):
        assert draws_random_numbers(graph.call_function(attention, arguments, kwargs)) == is_random


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_state_is_kept_for_an_attention_that_drops_alone(rate):
    flash = aten._scaled_dot_product_flash_attention.default
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 4, 64, 32, dtype=torch.float16, device="cuda")
        attention = graph.call_function(flash, (x, x, x, rate))
        attention.meta["val"] = flash(*[x.meta["val"]] * 3, rate)
        result = graph.call_function(operator.getitem, (attention, 0))
        result.meta["val"] = attention.meta["val"][0]
        read = graph.call_function(aten.neg.default, (result,))
        read.meta = {"val": -result.meta["val"], IN_BACKWARD: True}
    graph.output((read,))
    runs = [OperatorRun(attention.name), OperatorRun(attention.name, 1)]
    runs.append(OperatorRun(read.name, 0, {attention.name: 1}))
    repeated = repeat_operators(fx.GraphModule({}, graph), runs, torch.device("cuda"))
    targets = [node.target for node in repeated.graph_module.graph.nodes]
    drawn_again = DRAWN_AGAIN[flash]
    assert (draws.random_state in targets) == (drawn_again in targets) == bool(rate)
    assert targets.count(flash) == (1 if rate else 2)


def noisy(self, x):
    """Draws of all kinds, in checkpoints, of nothing, and of tensors that lie in memory in other ways."""
    x = self.first(torch.cat([x, F.dropout(x[:0], 0.5)]))
    x = (x * torch.randn_like(x).mul_(0.1).add_(1)).sigmoid()
    x = F.dropout(x, 0.3) + torch.rand(x.shape, device=x.device) * x
    x = F.dropout(x.t(), 0.4).t().tanh() * torch.bernoulli(x.detach().clamp(0, 1))
    x = F.dropout(x, 0.0) + F.dropout(x, 1.0)
    x = torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False)
    x = x * torch.empty_like(x).exponential_() + x.sin() * torch.empty_like(x).uniform_(-1, 1)
    x = F.dropout(x.expand(2, -1, -1), 0.5).sum(0)
    return self.last(F.gelu(F.dropout(F.alpha_dropout(x, 0.2), 0.1, True, True)))


def noisy_model_and_batches():
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.3), nn.Sigmoid())
    model = Written(noisy, first=nn.Linear(6, 64), middle=middle, last=nn.Linear(64, 5))
    return model, [(torch.randn(32, 6), torch.randint(5, (32,))) for _ in range(3)]


@pytest.mark.parametrize("rewrites", ["none", "all"])
def test_all_kinds_of_draws_in_a_whole_step(rewrites, monkeypatch):
    dropping = Dropping(monkeypatch)
    dropping(share=0.8, again=0.5)
    model, batches = noisy_model_and_batches()
    WholeStep(model, sgd, batches[0], rewrites=rewrites).run(batches)
    assert sum(draws.AGAIN in target for target in dropping.repeated[0]) > 4


def forwards_then_backwards(called, model, x, y):
    losses = [F.cross_entropy(called(x + number), y) for number in range(2)]
    for loss, again in (*zip(losses, (True, False), strict=True), (losses[0], False)):
        torch.rand(3)
        loss.backward(retain_graph=again)
    return [loss.detach() for loss in losses]


def test_all_kinds_of_draws_in_forwards_of_several_backwards(monkeypatch):
    dropping = Dropping(monkeypatch)
    model, batches = noisy_model_and_batches()
    pair = OwnLoop(model, batches[0][:1])
    for x, y in batches:
        pair.zero_grad()
        pair.run_loop(partial(forwards_then_backwards, x=x, y=y))
        pair.update()
    pair.compare()
    assert sum(draws.AGAIN in target for target in dropping.repeated[0]) > 4
