"""A memory budget is kept by the settled step, with eager's bits; where none is found, the error says why."""

import gc
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import olla_fx
from olla_fx import BudgetError, within_budget
from olla_fx.eager.baseline import baseline_from_events
from olla_fx.step_plan import Plan
from olla_solvers.recomputation import least_time
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import images, sgd
from tests.olla_fx.recomputation.models import MODELS
from tests.olla_fx.run.whole_step.clipped import ClippedStep

RUNS = 5
"""Enough to settle: a choice may be made again after each of the first recorded runs."""


def network(depth=4, channels=8):
    torch.manual_seed(0)
    layers, inputs = [], 3
    for _ in range(depth):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


def batches(count=RUNS):
    return images(count, batch=4, size=24)


@pytest.fixture
def quick(monkeypatch):
    """Do not search long where a budget is not met."""
    monkeypatch.setattr(within_budget, "EFFORT", 1.0)


def plan(budget, model=None, **options):
    model = model or network()
    options = {"baseline": False, "device_profile": "a100", **options}
    return olla_fx.plan(
        model,
        batches(1)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        memory_budget=budget,
        **options,
    )


def measured_peak(run):
    """Return the most bytes that a run had requested and not yet freed."""
    with olla_fx.record() as recording:
        run()
    return baseline_from_events(recording.events).live_peak_bytes


def assert_kept(module):
    """Assert that the last run was settled and within the budget, with what was asked for outside."""
    planned = module.plan
    assert planned.workspaces_recorded
    assert_served(module)
    assert planned.memory_budget_bytes is not None
    assert planned.buffer_bytes + planned.output_bytes + planned.gradient_bytes == planned.needed_bytes
    assert planned.needed_bytes <= planned.memory_budget_bytes


def test_less_memory_takes_more_time():
    plans = [plan(share) for share in (1.0, 0.9, 0.8, 0.7, 0.5)]
    needed = [planned.needed_bytes for planned in plans]
    extra = [planned.extra_time for planned in plans]
    assert needed == sorted(needed, reverse=True)
    assert extra == sorted(extra)
    assert extra[0] == 0 < extra[-1]
    for planned in plans:
        assert planned.needed_bytes <= planned.memory_budget_bytes
        assert 0 <= planned.extra_time_bound <= planned.extra_time
        assert planned.budget.least_bytes <= planned.needed_bytes


def test_a_budget_in_bytes_is_that_of_its_share():
    share = plan(0.7)
    alike = plan(share.memory_budget_bytes)
    assert alike.needed_bytes == share.needed_bytes
    assert alike.extra_time == share.extra_time


def test_static_arrays_count_if_asked_for():
    model = network(channels=16)
    alone = plan(0.7, model)
    both = plan("1GiB", model, memory_budget_includes="static")
    assert both.needed_bytes == both.total_bytes == both.budget.plain_bytes
    tight = plan(both.total_bytes - 1, model, memory_budget_includes="static")
    assert tight.needed_bytes == tight.total_bytes < both.total_bytes
    assert tight.recomputed.operators
    assert alone.needed_bytes == alone.total_bytes - alone.static_bytes


def test_more_than_is_needed_changes_nothing(caplog):
    with caplog.at_level("INFO", logger="olla_fx"):
        planned = plan("1GiB")
    assert "is more than the step needs: nothing is recomputed" in caplog.text
    assert dict(planned.rows())["recomputed for it"] == "nothing, the step fits"
    assert not planned.recomputed.operators
    assert planned.peak_bytes == plan(None, recompute=0).peak_bytes


def test_that_it_is_more_is_said_once(caplog):
    with caplog.at_level("INFO", logger="olla_fx"):
        loop = OwnLoop(network(), batches()[0][0], memory_budget="1GiB", fallback="raise")
        loop.run([*batches(3), *images(2, batch=2, size=24)])
        loop.assert_served()
    assert caplog.text.count("is more than the step needs: nothing is recomputed") == 1


def test_a_plan_tells_its_budget(tmp_path):
    planned = plan(0.7)
    rows = dict(planned.rows())
    assert "memory budget for buffer, outputs" in rows
    assert rows["extra time within it, proven"].startswith("at least ")
    assert "estimated for a100" in rows["extra time for it, predicted"]
    planned.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.budget == planned.budget
    assert loaded.memory_budget_bytes == planned.memory_budget_bytes
    assert loaded.extra_time_bound == planned.extra_time_bound
    assert plan(None).memory_budget_bytes is None


@pytest.mark.usefixtures("quick")
def test_a_budget_that_is_proven_impossible():
    with pytest.raises(BudgetError, match="no plan within the memory budget of 1,000 B was found") as caught:
        plan(1000)
    text = str(caught.value)
    assert caught.value.is_proven
    assert caught.value.needed_bytes > 1000
    assert re.search(
        r"(at least [\d.,]+ (MiB|B) are proven necessary|less than that is proven impossible)", text
    )
    assert re.search(r"Most is alive at \w+.*; the largest arrays then are .* made at \S+\.py:\d+\)", text)
    # Five classes are no large part of it.
    assert text.endswith("Take a smaller batch or accumulation_steps")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("loss_chunks", "advised"), [(None, True), (4, False)])
def test_large_logits_are_told_how_to_be_computed_in_chunks(loss_chunks, advised):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 640))
    example = torch.randn(256, 16), torch.randint(640, (256,))
    with pytest.raises(BudgetError) as caught:
        olla_fx.plan(
            model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), memory_budget="1KiB",
            baseline=False, device_profile="a100", loss_chunks=loss_chunks,
        )  # fmt: skip
    assert str(caught.value).endswith("accumulation_steps or loss_chunks") is advised


@pytest.mark.usefixtures("quick")
def test_a_byte_too_little_is_told_in_bytes():
    smallest = nn.Sequential(nn.Linear(512, 512))
    example = torch.randn(2, 512), torch.randint(512, (2,))
    options = {"loss_fn": F.cross_entropy, "optimizer": sgd(smallest.parameters()), "baseline": False}
    needed_bytes = olla_fx.plan(smallest, example, memory_budget=1.0, **options).needed_bytes
    told = f"budget of {needed_bytes - 1:,} B .* needs {needed_bytes:,} B .* Take a smaller batch or acc"
    with pytest.raises(BudgetError, match=told):
        olla_fx.plan(smallest, example, memory_budget=needed_bytes - 1, **options)


@pytest.mark.parametrize(("solver", "asked"), [("none", None), ("highs", "highs"), ("cbc", "cbc")])
def test_the_solver_that_was_asked_for_states_programs(solver, asked, monkeypatch):
    solvers = []

    def last_answer(function, arguments, seconds):
        solvers.append(arguments[-1])

    monkeypatch.setattr(least_time.apart, "last_answer", last_answer)
    planned = plan(0.7, network(depth=12), solver=solver)
    assert planned.needed_bytes <= planned.memory_budget_bytes
    assert set(solvers) == ({asked} if asked else set())


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
    assert 0 < plan.measured_extra_time < 1
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


def plan_of(name, budget):
    make, examples = MODELS[name]
    torch.manual_seed(0)
    model, example = make(), examples(1)[0]
    options = {"memory_budget": budget, "baseline": False, "device_profile": "a100"}
    return olla_fx.plan(model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), **options)


def test_less_memory_takes_more_time_in_calls_of_their_own():
    plans = [plan_of("transformer", share) for share in (0.9, 0.7, 0.5)]
    needed = [planned.needed_bytes for planned in plans]
    extra = [planned.extra_time for planned in plans]
    assert needed == sorted(needed, reverse=True)
    assert extra == sorted(extra)


@pytest.mark.usefixtures("quick")
def test_every_budget_that_is_too_small_is_told_the_same_plan():
    told = set()
    for share in (0.5, 0.3):
        with pytest.raises(BudgetError) as caught:
            plan_of("residual", share)
        told.add(caught.value.needed_bytes)
    assert len(told) == 1
    smallest = told.pop()
    assert plan_of("residual", smallest).needed_bytes <= smallest


@pytest.mark.parametrize(
    "name",
    [
        "lstm cell",
        "lstm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "skip", "shared")),
    ],
)
@pytest.mark.usefixtures("quick")
def test_the_smallest_plan_that_is_told_is_found(name):
    make, examples = MODELS[name]
    torch.manual_seed(0)
    model, given = make(), examples(RUNS)
    with pytest.raises(BudgetError) as caught:
        OwnLoop(model, given[0][0], memory_budget=1)
    loop = OwnLoop(model, given[0][0], memory_budget=caught.value.needed_bytes)
    assert loop.step.plan.needed_bytes <= caught.value.needed_bytes
    with warnings.catch_warnings():
        # The kernels' workspaces may not fit beside it.
        warnings.filterwarnings("ignore", "no plan within the memory budget")
        loop.run(given)
    loop.assert_served()


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


def test_a_loss_is_computed_in_chunks_if_the_budget_needs_it():
    def within(budget):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(128, 640, bias=False))
        example = torch.randn(1024, 128), torch.randint(640, (1024,))
        options = {"baseline": False, "device_profile": "a100", "loss_chunks": 4}
        return olla_fx.plan(
            model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()),
            memory_budget=budget, **options,
        )  # fmt: skip

    whole, chunked = within(0.8), within(0.6)
    assert not any(change.rewrite == "chunked_loss" for change in whole.changes)
    assert any(change.rewrite == "chunked_loss" for change in chunked.changes)
    # What chunks compute again counts.
    again_seconds = sum(array.seconds for array in chunked.recomputed.arrays)
    assert chunked.recomputed.extra_seconds > again_seconds
    assert 0 <= chunked.extra_time_bound <= chunked.extra_time
    assert chunked.recomputed.step_seconds == whole.recomputed.step_seconds


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


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_is_an_error_first_and_later_a_warning():
    model, small, large = network(), *(images(1, batch=size, size=24)[0] for size in (2, 16))
    with pytest.raises(BudgetError):
        olla_fx.optimize(model, large, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()),
                         memory_budget="100KiB")  # fmt: skip
    budget = plan(None, model).needed_bytes
    step = WholeStep(model, sgd, small, memory_budget=budget, fallback="eager", runs_to_settle=3)
    step.train(small)
    step.train(small)
    with pytest.warns(RuntimeWarning, match=r"no plan within the memory budget of .* The step runs with it"):
        step.run([large] * 3)
    step.compare()
