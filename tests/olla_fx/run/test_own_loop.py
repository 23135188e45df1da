"""The caller's own loop: forward and backward planned together, loss and optimizer left to the caller."""

import copy
import gc
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import CaptureError
from olla_fx.errors import BackwardError
from tests.olla_fx.helpers import SmallNet, assert_same, assert_same_models, images, mlp, sgd, vectors


class Loops:
    """One model twice, from the same weights: in an eager loop, and in the same loop around a planned one."""

    def __init__(self, model, example, make=sgd, loss_fn=F.cross_entropy, context=nullcontext):
        self.eager, self.model = copy.deepcopy(model), model
        self.optimizers = [make(each.parameters()) for each in (self.eager, model)]
        self.loss_fn, self.context = loss_fn, context
        self.planned = olla_fx.optimize(model, example, solver="none")
        self.calls = 0

    def losses(self, *batch):
        """Forward and loss of both, from the same random numbers."""
        *inputs, target = batch
        losses = []
        for module in (self.eager, self.planned):
            torch.manual_seed(self.calls)
            with self.context():
                losses.append(self.loss_fn(module(*inputs), target))
        self.calls += 1
        assert_same(losses[0].detach(), losses[1].detach(), "loss")
        return losses

    def compare_gradients(self):
        for (name, one), other in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                assert_same(one.grad, other.grad, f"gradient of {name}")

    def step(self, *batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.planned.poison()
        for loss in self.losses(*batch):
            loss.backward()
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, batches):
        for batch in batches:
            self.step(*batch)
        assert_same_models(self.eager, self.model)
        return self

    def assert_served(self):
        assert self.planned.binding == "buffer"
        assert not self.planned.is_busy
        assert self.planned.counts.served > 0
        assert self.planned.counts.outside == 0, self.planned.outside_log
        assert self.planned.stock_runs == 0


@pytest.mark.parametrize("make", [sgd, partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), optim.AdamW])
@pytest.mark.parametrize(("model", "batches"), [(mlp, vectors), (SmallNet, images)])
def test_twenty_steps(model, batches, make):
    loops = Loops(model(), batches(1)[0][0], make).run(batches(20))
    loops.assert_served()
    assert loops.planned.replans == 0
    gradients = sum(each.grad is not None for each in loops.model.parameters())
    assert loops.planned.counts.outputs == 1 + gradients


def test_the_plan_covers_both_phases():
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(3))
    plan, (forward, backward) = loops.planned.plan, loops.planned.graph_modules
    assert "convolution.default" in forward.code
    assert "convolution_backward" in backward.code
    assert "convolution_backward" not in forward.code
    assert plan.peak_bytes >= plan.lower_bound_bytes > 0
    report = loops.planned.report()
    assert report.plan.baseline.live_peak_bytes > 0
    for line in ("outputs, outside the buffer", "eager live peak (dispatched)"):
        assert line in str(report)
    assert plan.buffer_bytes >= plan.peak_bytes


def test_a_schedule_and_gradient_clipping_of_the_callers():
    loops = Loops(SmallNet(), images(1)[0][0])
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in loops.optimizers]
    for batch in images(6):
        for loss in loops.losses(*batch):
            loss.backward()
        for model, optimizer, scheduler in zip(
            (loops.eager, loops.model), loops.optimizers, schedulers, strict=True
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert_same_models(loops.eager, loops.model)
    loops.assert_served()


def test_gradients_accumulate():
    loops = Loops(SmallNet(), images(1)[0][0])
    for index, batch in enumerate(images(9)):
        for loss in loops.losses(*batch):
            (loss / 3).backward()
        loops.compare_gradients()
        if index % 3 == 2:
            for optimizer in loops.optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_models(loops.eager, loops.model)
    loops.assert_served()


def test_autocast():
    loops = Loops(
        SmallNet(), images(1)[0][0], context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ).run(images(4))
    assert loops.planned.replans == 1
    loops.assert_served()


class Several(nn.Module):
    """Several inputs and outputs: one without a gradient, one that nobody may use, a number."""

    def __init__(self):
        super().__init__()
        self.body, self.other = mlp(), mlp()

    def forward(self, x, y):
        hidden = self.body(x)
        return {"a": hidden * y, "b": (self.other(x), hidden.argmax(1), 7), "same": x}


def test_outputs_of_all_kinds():
    loops = Loops(Several(), (torch.ones(4, 6), torch.ones(4, 3)))
    for attempt in range(4):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        answers = [module(x, y) for module in (loops.eager, loops.planned)]
        assert_same(
            *[torch.utils._pytree.tree_map_only(torch.Tensor, torch.detach, each) for each in answers],
            "outputs",
        )
        assert not answers[1]["b"][1].requires_grad
        assert not answers[1]["same"].requires_grad
        for answer in answers:
            (answer["a"].sum() if attempt % 2 else answer["a"].sum() + answer["b"][0].prod()).backward()
        for (name, one), other in zip(loops.eager.named_parameters(), loops.model.parameters(), strict=True):
            # A planned backward gives zeros where eager gives nothing for an output that was not used.
            assert_same(torch.zeros_like(one) if one.grad is None else one.grad, other.grad, name)
    loops.assert_served()


def test_inputs_that_want_a_gradient():
    loops = Loops(SmallNet(), images(1)[0][0].requires_grad_())
    for image, target in images(4):
        inputs = [image.clone().requires_grad_() for _ in range(2)]
        losses = []
        for module, one in zip((loops.eager, loops.planned), inputs, strict=True):
            torch.manual_seed(0)
            losses.append(F.cross_entropy(module(one * 2), target))
        for loss in losses:
            loss.backward()
        assert_same(inputs[0].grad, inputs[1].grad, "input gradient")
        loops.compare_gradients()
    loops.assert_served()


def test_only_some_gradients():
    loops = Loops(mlp(), vectors(1)[0][0])
    for x, y in vectors(3):
        for module, model in ((loops.eager, loops.eager), (loops.planned, loops.model)):
            F.cross_entropy(module(x), y).backward(inputs=[model[2].weight])
        loops.compare_gradients()
    loops.assert_served()


def test_a_model_within_a_larger_one():
    """Gradients flow into the planned part's inputs and out of its outputs."""
    eager = nn.Sequential(nn.Linear(6, 6), mlp(), nn.Linear(3, 3))
    planned = copy.deepcopy(eager)
    inner = olla_fx.optimize(planned[1], torch.ones(4, 6, requires_grad=True), solver="none")
    for x, y in vectors(5):
        F.cross_entropy(eager(x), y).backward()
        F.cross_entropy(planned[2](inner(planned[0](x))), y).backward()
        for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")
    assert inner.counts.served > 0
    assert inner.counts.outside == 0


def test_another_forward_while_the_buffer_is_busy():
    """Sharing the buffer gave a gradient of 20 where eager has 12."""
    loops = Loops(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(4)
    for optimizer in loops.optimizers:
        optimizer.zero_grad()
    first = loops.losses(*batches[0])
    assert loops.planned.is_busy
    second = loops.losses(*batches[1])
    with torch.no_grad():
        assert_same(loops.eager(batches[2][0]), loops.planned(batches[2][0]), "under no_grad")
    smaller = loops.losses(*(each[:1].repeat(2, *[1] * (each.dim() - 1)) for each in batches[3]))
    assert loops.planned.stock_runs == 3
    for losses in (second, first, smaller):
        for loss in losses:
            loss.backward()
    loops.compare_gradients()
    assert not loops.planned.is_busy
    loops.planned.stock_runs = 0
    loops.run(images(3))
    loops.assert_served()


def test_a_dropped_graph_gives_the_buffer_back():
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(2))
    gc.disable()
    try:
        loss = loops.losses(*images(1)[0])
        assert loops.planned.is_busy
        del loss
        assert not loops.planned.is_busy
    finally:
        gc.enable()
    loops.run(images(2))
    loops.assert_served()


def test_a_first_call_without_backward():
    loops = Loops(SmallNet(), images(1)[0][0])
    loops.losses(*images(1)[0])
    loops.run(images(4))
    loops.assert_served()


def test_backward_twice():
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(2))
    losses = loops.losses(*images(1)[0])
    for loss in losses:
        loss.backward(retain_graph=True)
    assert loops.planned.is_busy
    for loss in losses:
        loss.backward()
    loops.compare_gradients()
    assert not loops.planned.is_busy
    output = loops.planned(images(1)[0][0])
    output.sum().backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="retain_graph"):
        output.sum().backward()
    loops.eager.load_state_dict(loops.model.state_dict())
    loops.run(images(2))


def test_a_first_backward_that_is_retained():
    loops = Loops(SmallNet(), images(1)[0][0])
    losses = loops.losses(*images(1)[0])
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    loops.compare_gradients()
    for optimizer in loops.optimizers:
        optimizer.zero_grad()
    loops.run(images(4))
    loops.assert_served()


def test_gradients_of_gradients_are_refused():
    loops = Loops(mlp(), vectors(1)[0][0])
    output = loops.planned(vectors(1)[0][0]).square().sum()
    (gradient,) = torch.autograd.grad(output, [loops.model[0].weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    del gradient, output
    loops.run(vectors(2))


@pytest.mark.parametrize("what", ["parameter", "input", "output"])
def test_what_backward_needs_and_was_changed(what):
    """As in eager; the buffer is free again."""
    loops = Loops(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), vectors(1)[0][0].requires_grad_())
    x = vectors(1)[0][0].requires_grad_()
    answer = loops.planned(x)
    changed = {"parameter": loops.model[0].weight, "input": x, "output": answer}[what]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        answer.sum().backward()
    del answer
    assert not loops.planned.is_busy


def test_an_output_may_be_changed_where_backward_does_not_need_it():
    loops = Loops(mlp(), vectors(1)[0][0])
    for x, y in vectors(3):
        for module in (loops.eager, loops.planned):
            F.cross_entropy(module(x).mul_(2).relu_(), y).backward()
        loops.compare_gradients()


def test_an_exception_between_forward_and_backward():
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(2))

    def fail():
        loss = F.cross_entropy(loops.planned(images(1)[0][0]), images(1)[0][1])
        raise KeyError(loss)

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    for optimizer in loops.optimizers:
        optimizer.zero_grad()
    loops.eager.load_state_dict(loops.model.state_dict())
    loops.run(images(3))
    loops.assert_served()


def test_evaluation_in_between():
    loops = Loops(SmallNet(), images(1)[0][0])
    for _ in range(2):
        loops.run(images(2))
        for module in (loops.eager, loops.planned):
            module.eval()
        for image, _ in images(3):
            with torch.no_grad():
                assert_same(loops.eager(image), loops.planned(image), "evaluation")
        for module in (loops.eager, loops.planned):
            module.train()
    loops.run(images(2))
    loops.assert_served()
    assert loops.planned.replans == 0


def test_frozen_statistics_and_layers():
    """Some modules in eval mode, then a layer frozen and unfrozen again."""
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(2))
    for model in (loops.eager, loops.model):
        model.norm.eval()
    loops.run(images(2))
    for wanted in (False, True):
        for model in (loops.eager, loops.model):
            model.conv.requires_grad_(wanted)
            model.zero_grad()
        loops.run(images(2))
    loops.assert_served()


def test_shapes_are_planned_once_each():
    loops = Loops(SmallNet(), images(1, size=8)[0][0])
    for _ in range(3):
        for size, batch in ((8, 2), (10, 2), (8, 3)):
            loops.run(images(1, batch=batch, size=size))
    loops.assert_served()
    assert loops.planned.replans == 0
    assert len(loops.planned._plans) == 3


def test_hooks_of_parameters_run():
    loops = Loops(mlp(), vectors(1)[0][0])
    for model in (loops.eager, loops.model):
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    loops.run(vectors(3))
    loops.assert_served()


def test_threads():
    """Each thread trains on its own; who finds the buffer busy runs beside it."""
    loops = Loops(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(8)
    expected = [
        torch.autograd.grad(loops.eager(image).sum(), loops.eager.conv.weight) for image, _ in batches
    ]
    found = {}

    def work(index):
        for _ in range(5):
            output = loops.planned(batches[index][0])
            found[index] = torch.autograd.grad(output.sum(), loops.model.conv.weight)

    loops.eager.eval()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        assert_same(expected[index], found[index], f"thread {index}")
    assert not loops.planned.is_busy


def test_two_modules_in_turn():
    loops = [Loops(SmallNet(), images(1)[0][0]) for _ in range(2)]
    for batch in images(4):
        for one in loops:
            one.step(*batch)
        losses = [one.losses(*batch) for one in loops]
        for pair in losses:
            for loss in pair:
                loss.backward()
        for one in loops:
            one.compare_gradients()
            assert_same_models(one.eager, one.model)
    for one in loops:
        one.assert_served()


def test_a_model_without_gradients_is_planned_for_inference():
    model = mlp().requires_grad_(False)
    planned = olla_fx.optimize(model, vectors(1)[0][0])
    for x, _ in vectors(3):
        assert_same(model(x), planned(x), "answer")
    assert planned.counts.served > 0


def test_reentrant_checkpoints_are_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(6, 6), mlp()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=True)

    with pytest.raises(CaptureError, match="use_reentrant=False"):
        olla_fx.optimize(Checkpointed(), vectors(1)[0][0])


def test_errors_have_one_base():
    assert issubclass(BackwardError, olla_fx.OllaError)
    assert issubclass(BackwardError, RuntimeError)
