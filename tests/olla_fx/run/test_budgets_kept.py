"""A memory budget is kept by the settled step, with eager's bits, in every way to run it."""

import gc
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import olla_fx
from olla_fx import BudgetError
from olla_fx.step_plan import Plan
from tests.olla_fx.budgets import RUNS, assert_kept, batches, measured_peak, network
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import images, sgd
from tests.olla_fx.run.whole_step.clipped import ClippedStep


def test_that_it_is_more_is_said_once(caplog):
    with caplog.at_level("INFO", logger="olla_fx"):
        loop = OwnLoop(network(), batches()[0][0], memory_budget="1GiB", fallback="raise")
        loop.run([*batches(3), *images(2, batch=2, size=24)])
        loop.assert_served()
    assert caplog.text.count("is more than the step needs: nothing is recomputed") == 1


def nodes_alive():
    gc.collect()
    return sum(type(item) is fx.Node for item in gc.get_objects())


def test_a_settled_step_holds_one_graph():
    """What the choice for the budget was made from is not needed again."""
    before, model = nodes_alive(), network()
    example, optimizer = batches(1)[0], sgd(model.parameters())
    step = olla_fx.optimize(model, example, loss_fn=F.cross_entropy, optimizer=optimizer, memory_budget=0.7)
    for _ in range(RUNS):
        step(*example)
    assert step.plan.recomputed.operators
    graph = step._plans.current.executor.step.dataflow.graph_module.graph
    assert nodes_alive() - before < 1.1 * len(graph.nodes)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_the_repetitions_took_is_told(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # by which the clock is chosen
    loop = OwnLoop(network(), batches()[0][0], memory_budget=0.7)
    loop.run(batches(2))
    assert loop.step.plan.measured_extra_time is None
    assert "extra time for it, measured" not in dict(loop.step.plan.rows())
    loop.run(batches())
    loop.assert_served()
    plan = loop.step.plan
    assert plan.measured_extra_time > 0  # how much of the step it is depends on what else runs
    told = dict(plan.rows())["extra time for it, measured"]
    assert told == f"{plan.measured_extra_time:.2%} of the step (each operator timed in one run of it)"
    assert Plan.from_json(plan.to_json()).measured_extra_time == plan.measured_extra_time


def test_a_whole_step_keeps_its_budget():
    loop = WholeStep(network(), sgd, batches()[0], memory_budget=0.7, runs_to_settle=3).run(batches())
    assert loop.step.plan.recomputed.operators
    assert_kept(loop.step)
    peak_bytes = measured_peak(lambda: loop.step(*batches(1)[0]))
    assert peak_bytes <= loop.step.plan.memory_budget_bytes < loop.step.plan.budget.plain_bytes


def test_a_loop_of_ones_own_keeps_its_budget():
    loop = OwnLoop(network(), batches()[0][0], memory_budget=0.7).run(batches())
    loop.assert_served()
    assert loop.step.plan.recomputed.operators
    assert_kept(loop.step)
    (x, y), _ = batches(1)[0], loop.zero_grad()
    peak_bytes = measured_peak(lambda: F.cross_entropy(loop.step(x), y).backward())
    assert peak_bytes <= loop.step.plan.memory_budget_bytes < loop.step.plan.budget.plain_bytes


def test_gradients_that_are_not_cleared_count():
    """They lie outside the buffer, so that another plan is needed, in which more is computed again."""
    loop = OwnLoop(network(channels=48), batches()[0][0], memory_budget=0.75).run(batches(3))
    before = loop.step.plan
    assert before.gradient_bytes == 0
    for batch in batches(4):
        for loss in loop.losses(batch):
            loss.backward()
        loop.compare_gradients()
    assert loop.step.plan.gradient_bytes > 0
    assert loop.step.plan.memory_budget_bytes == before.memory_budget_bytes
    assert loop.step.plan.recomputed.operators > before.recomputed.operators
    assert_kept(loop.step)


def test_what_dynamo_cuts_out_keeps_its_budget():
    loop = CompiledLoop(network(), options={"memory_budget": 0.7}).run(batches())
    loop.assert_served(1)
    (module,) = loop.planned_modules()
    assert module.plan.recomputed.operators
    assert_kept(module)


def test_micro_batches_keep_a_budget():
    options = {"memory_budget": 0.9, "parts": 2, "norm": 0.5, "runs_to_settle": 3}
    step = ClippedStep(network(), sgd, batches()[0], **options).run(batches()).step
    assert step.plan.recomputed.operators
    assert step.plan.gradient_bytes > 0
    assert step.plan.budget.plain_bytes * 0.9 >= step.plan.memory_budget_bytes
    assert_kept(step)


def test_gradients_that_wait_for_their_norm_are_made_twice():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())))
    examples = [(torch.randn(2, 64), torch.randint(64, (2,))) for _ in range(RUNS)]
    options = {"memory_budget": 0.5, "norm": 0.1, "runs_to_settle": 3}
    step = ClippedStep(model, sgd, examples[0], **options).run(examples).step
    assert step.plan.peak_bytes < 0.6 * sum(weight.nbytes for weight in model.parameters())
    assert step.plan.recomputed.operators
    assert_kept(step)


def test_logits_that_become_their_gradient_are_kept_where_gradients_wait_for_their_norm():
    """Forward makes them and backward writes over them, in parts; both could run again for the update."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 2048, bias=False))
    examples = [(torch.randn(512, 32), torch.randint(2048, (512,))) for _ in range(RUNS)]
    options = {"memory_budget": 0.97, "norm": 0.1, "runs_to_settle": 3}
    step = ClippedStep(model, sgd, examples[0], **options).run(examples).step
    assert any(change.rewrite == "loss_gradients" for change in step.plan.changes)
    assert step.plan.recomputed.operators
    assert_kept(step)


def test_inference_recomputes_nothing():
    model, example = network(), batches(2)
    step = check_inference(model, [batch[:1] for batch in example], 1, memory_budget="1MiB")
    assert not step.plan.recomputed.operators
    with pytest.raises(BudgetError, match=r"Take a smaller batch$") as caught:
        olla_fx.optimize(model, example[0][0], memory_budget="1KiB")
    assert caught.value.is_proven


def test_a_share_is_none_of_inference():
    """Nothing is kept there that could be computed again."""
    step = check_inference(network(), [batch[:1] for batch in batches(2)], 1, memory_budget=0.5)
    assert step.plan.memory_budget_bytes is None


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_and_a_smaller_batch_need_not_keep_a_share_of_their_own(compiled):
    model, examples = network(), batches(3)
    last = tuple(tensor[:2] for tensor in examples[0])
    if compiled:
        step = torch.compile(model, backend="olla_fx", options={"memory_budget": 0.7}, dynamic=False)
    else:
        step = olla_fx.optimize(model, examples[0][0], memory_budget=0.7, fallback="raise")

    def run():
        step.train()
        for x, y in (*examples, last):
            model.zero_grad()
            F.cross_entropy(step(x), y).backward()
        step.eval()
        with torch.no_grad():
            return step(examples[0][0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [run() for _ in range(3)]
    if not compiled:
        plans = [plan.plan for plan in step._plans.cache.newest_first()]
        kinds = {(plan.memory_budget_bytes, plan.recomputed.operators > 0) for plan in plans}
        (budget_bytes,) = {budget for budget, recomputes in kinds if recomputes}
        assert kinds == {(budget_bytes, True), (budget_bytes, False), (None, False)}
    assert results[0].shape == results[1].shape


class NarrowNorms(nn.Module):
    """Layers that normalise rows so short that their means and deviations are a third of all bytes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.LayerNorm(8), nn.Linear(8, 8)))
        )

    def forward(self, x):
        return self.layers(x)[..., 0].flatten(1)


def test_results_that_are_larger_than_kernels_say_count():
    """Under autocast, CPU kernels make means and deviations in float32 and say bfloat16."""
    torch.manual_seed(0)
    examples = [(torch.randn(8, 512, 8), torch.randint(512, (8,))) for _ in range(RUNS)]
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    loop = OwnLoop(NarrowNorms(), examples[0][0], context=autocast, memory_budget=0.5).run(examples)
    loop.assert_served()
    assert loop.step.plan.recomputed.operators
    assert_kept(loop.step)
