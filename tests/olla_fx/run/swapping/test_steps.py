"""Steps whose arrays wait on the host compute what eager does, with both buffers overwritten before each."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import link
from olla_fx.eager.baseline import baseline_from_events
from olla_fx.errors import HostMemoryError
from olla_fx.models.vision import import_torchvision
from olla_fx.step_plan import Plan
from olla_solvers.swapping.autoswap.planner import AutoSwap
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.autoswap.weights import only
from olla_solvers.swapping.timed_step import TimedStep
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, images, mlp, sgd, vectors
from tests.olla_fx.recomputation.models import MODELS, Layers, Transformer, sequences, tokens
from tests.olla_fx.run.whole_step.clipped import ClippedStep
from tests.olla_fx.transfers import FAST, SLOW, at_once, far_ones, swapping


def resnet():
    return import_torchvision().models.resnet18(num_classes=5)


def deep(width=32, layers=6):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(width, 3))


STEPS = {
    "mlp": (mlp, vectors),
    "resnet18": (resnet, lambda count: images(count, size=32)),
    "transformer": (Transformer, tokens),
    "lstm": (Layers, sequences),
    "residual": MODELS["residual"],
}
ALL_STEPS = [
    *STEPS,
    *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS.keys() - STEPS.keys())),
]


def assert_swapped(module, least=1):
    """Assert that arrays of the last run waited on the host."""
    assert len(module.plan.swapped.arrays) >= least
    assert module.plan.host_bytes > 0
    assert_served(module)


@pytest.mark.parametrize("name", ALL_STEPS)
def test_whole_steps(name):
    make, batches = {**MODELS, **STEPS}[name]
    torch.manual_seed(0)
    loop = WholeStep(make(), MOMENTUM, batches(1)[0], swap=swapping(SLOW), runs_to_settle=2)
    loop.run(batches(4))
    assert_swapped(loop.step)
    assert loop.step.stats.stalled_seconds > 0


@pytest.mark.parametrize("name", ALL_STEPS)
def test_loops_of_ones_own(name):
    make, batches = {**MODELS, **STEPS}[name]
    torch.manual_seed(0)
    loop = OwnLoop(make(), batches(1)[0][0], swap=swapping(SLOW)).run(batches(4))
    assert_swapped(loop.step)
    loop.assert_served()


def test_a_fast_link():
    torch.manual_seed(0)
    batches = vectors(4, width=32)
    assert_swapped(WholeStep(deep(), ADAMW, batches[0], swap=swapping(FAST)).run(batches).step)
    assert_swapped(OwnLoop(deep(), batches[0][0], swap=swapping(FAST)).run(batches).step)


@pytest.mark.parametrize("choose", [at_once, far_ones])
def test_other_distances(choose):
    loop = WholeStep(deep(), ADAMW, vectors(1, width=32)[0], swap=swapping(SLOW, choose))
    loop.run(vectors(4, width=32))
    assert_swapped(loop.step)


def by_autoswap(stated):
    """Choose as AutoSwap does, what may wait within a step."""
    step = TimedStep(stated.problem, stated.order, stated.seconds)
    planner = AutoSwap.of(step, stated.link, least_bytes=1)
    transfers = planner.plan(int(0.8 * step.peak_bytes), only(Score.SUBMODULAR)).transfers
    return [
        transfer
        for transfer in transfers
        if transfer.array in stated.may_wait and transfer.back_before < step.length
    ]


def test_plans_of_autoswap_can_be_carried_out():
    batches = vectors(4, batch=512, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], recompute=0, swap=swapping(SLOW, by_autoswap)).run(batches)
    assert_swapped(loop.step)
    assert loop.step.plan.swapped.saved_bytes > 0


def test_inference():
    batches = [(x,) for x, _ in images(4, size=32)]
    step = check_inference(resnet(), batches, 1, swap=swapping(SLOW))
    assert step.plan.swapped.arrays


def test_micro_batches():
    batches = vectors(4, batch=8, width=32)
    loop = ClippedStep(deep(), sgd, batches[0], swap=swapping(SLOW), parts=2, norm=0.1, outputs=None)
    loop.run(batches)
    assert_swapped(loop.step)


def test_compiled():
    loop = CompiledLoop(deep(), options={"swap": swapping(SLOW)})
    loop.run(vectors(4, width=32))
    assert_swapped(loop.pieces[0].module)


def test_recomputed_arrays_wait_too():
    make, batches = MODELS["residual"]
    loop = WholeStep(make(), sgd, batches(1)[0], swap=swapping(SLOW), recompute=1.0)
    loop.run(batches(4))
    assert_swapped(loop.step)
    names = {array.name for array in loop.step.plan.swapped.arrays}
    assert loop.step.plan.recomputed.operators
    assert any("repeated" in name for name in names)


def test_arrays_wait_several_times():
    make, batches = MODELS["residual"]
    loop = WholeStep(make(), sgd, batches(1)[0], swap=swapping(SLOW), recompute=0)
    loop.run(batches(4))
    names = [array.name for array in loop.step.plan.swapped.arrays]
    assert len(set(names)) < len(names)


def test_the_measured_peak_falls_as_planned():
    batches = vectors(4, batch=512, width=32)
    x, y = batches[0]
    peaks = []
    for options in ({}, {"swap": swapping(FAST, far_ones)}):
        torch.manual_seed(0)
        loop = WholeStep(deep(), sgd, batches[0], recompute=0, **options).run(batches)
        with olla_fx.record() as recording:
            loop.step(x, y)
        measured = baseline_from_events(recording.events).live_peak_bytes
        # The buffer stands all the time; what else is requested is the loss.
        assert measured <= loop.step.plan.needed_bytes
        peaks.append((loop.step.plan.peak_bytes, loop.step.plan.swapped.saved_bytes))
    (plain, _), (swapped, saved) = peaks
    assert swapped < 0.7 * plain
    assert plain - swapped == saved


def test_waits_are_needed(monkeypatch):
    """What is not waited for is wrong on a slow link, or the tests above would show nothing."""
    batches = vectors(4, batch=64, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], recompute=0, swap=swapping(SLOW, at_once))
    for batch in batches[:2]:
        loop.train(batch)
    monkeypatch.setattr("olla_fx.link.session.Session.wait_in", lambda *_: None)
    with pytest.raises(AssertionError):
        loop.train(batches[2])


def test_backward_twice():
    torch.manual_seed(0)
    x, y = vectors(1, width=32)[0]
    loop = OwnLoop(deep(), x, swap=swapping(SLOW))
    loop.run(vectors(3, width=32))
    for _ in range(3):
        losses = loop.losses((x, y))
        loop.zero_grad()
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        loop.compare_gradients()
        loop.update()
    loop.compare()


def test_forwards_before_their_backwards_have_memory_of_their_own():
    torch.manual_seed(0)
    (x, y), (other, target) = vectors(2, width=32)
    loop = OwnLoop(deep(), x, swap=swapping(SLOW)).run(vectors(3, width=32))
    for _ in range(2):
        loop.zero_grad()
        first, second = loop.losses((x, y)), None
        del second
        answers = []
        for called, _, _ in loop.sides():
            answers.append(F.cross_entropy(called(other), target))
        assert_same(answers[0].detach(), answers[1].detach(), "the second loss")
        for one, another in zip(first, answers, strict=True):
            one.backward()
            another.backward()
        loop.compare_gradients()
        loop.update()


def test_a_forward_without_backward_leaves_nothing_behind():
    x, _ = vectors(1, width=32)[0]
    loop = OwnLoop(deep(), x, swap=swapping(SLOW)).run(vectors(3, width=32))
    for _ in range(3):
        assert loop.step(x).requires_grad
    loop.run(vectors(3, width=32))
    loop.assert_served()


def test_an_error_in_the_middle_of_a_step_leaves_it_usable():
    batches = vectors(4, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], swap=swapping(SLOW)).run(batches)
    x, y = batches[0]
    with pytest.raises(IndexError):
        loop.step(x, torch.full_like(y, 99))
    loop.run(batches)
    assert_served(loop.step)


def test_an_interrupt_while_an_interrupted_step_ends_leaves_it_usable(monkeypatch):
    batches = vectors(4, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], swap=swapping()).run(batches)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("olla_fx.link.session.Session.wait_out", interrupt)
        patch.setattr("olla_fx.link.engines._ThreadsCopy.drain", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:  # with its frames, as a notebook keeps the last one
            loop.step(*batches[0])
    assert not loop.step.stats.is_busy
    del kept
    loop.step(*batches[0])


def test_an_error_of_a_copy_reaches_the_caller(monkeypatch):
    batches = vectors(4, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], swap=swapping()).run(batches)

    def fail(*_):
        raise OSError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr("olla_fx.link.engines._copy_at_speed", fail)
        with pytest.raises(OSError, match="the link is down"):
            loop.step(*batches[0])
    loop.run(batches)


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
def test_a_host_without_memory_is_told_and_the_step_goes_on_when_there_is_some(kind, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("not enough memory")

    batches = vectors(4, width=32)
    torch.manual_seed(0)
    example = (deep(), sgd, batches[0]) if kind is WholeStep else (deep(), batches[0][0])
    loop = kind(*example, swap=swapping())
    inputs = batches[0] if kind is WholeStep else batches[0][:1]
    with monkeypatch.context() as patch:
        patch.setattr("olla_fx.link.host_memory.torch", SimpleNamespace(empty=fail, uint8=torch.uint8))
        with pytest.raises(HostMemoryError, match=r"of memory for the arrays that wait there: not enough"):
            loop.step(*inputs)
    loop.run(batches)
    assert_swapped(loop.step)


def test_threads_end_with_the_plan():
    before = set(threading.enumerate())
    loop = WholeStep(deep(), sgd, vectors(1, width=32)[0], swap=swapping()).run(vectors(3, width=32))
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"olla_fx copies out", "olla_fx copies in"}
    del loop
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_plans_are_told_written_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLA_FX_CACHE_DIR", str(tmp_path))
    batches = vectors(4, width=32)
    torch.manual_seed(0)
    loop = WholeStep(deep(), sgd, batches[0], swap=swapping(SLOW)).run(batches)
    plan = loop.step.plan
    rows = dict(plan.rows())
    assert rows["swapped to the host"].startswith(f"{len(plan.swapped.arrays)} arrays, peak ")
    assert "0.2 GB/s" in rows["copied out and in"]
    assert rows["stalls for it, predicted"] != "0.00% of the step"
    # In the sequence that it has, which is fixed.
    assert rows["smallest peak of these operators"] == "yes, proven"
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    again = WholeStep(deep(), sgd, batches[0], swap=swapping(SLOW)).run(batches)
    assert again.step.plan.host_bytes == plan.host_bytes
    remade = pickle.loads(pickle.dumps(loop.step))
    assert remade.plan.swapped.moved_bytes == plan.swapped.moved_bytes > 0


def test_graphs_run_in_their_step_alone():
    with pytest.raises(RuntimeError, match="as a part of its planned step alone"):
        link.offload(torch.ones(2), 0)
