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
from olla_fx import CaptureError, StepInputError, StepModeError
from olla_fx.errors import BackwardError
from olla_solvers.errors import OptionError
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
        if not self.planned.is_busy:
            self.planned.poison()
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
        assert not self.planned.is_busy
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


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_schedule_and_gradient_clipping_of_the_callers(clip):
    loops = Loops(SmallNet(), images(1)[0][0])
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in loops.optimizers]
    for batch in images(20):
        for loss in loops.losses(*batch):
            loss.backward()
        for model, optimizer, scheduler in zip(
            (loops.eager, loops.model), loops.optimizers, schedulers, strict=True
        ):
            clip(model.parameters(), 0.02)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert_same_models(loops.eager, loops.model)
    loops.assert_served()


def test_gradients_accumulate():
    loops = Loops(SmallNet(), images(1)[0][0])
    for index, batch in enumerate(images(21)):
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
    ).run(images(20))
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
    for attempt in range(20):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        loops.planned.poison()
        answers = [module(x, y) for module in (loops.eager, loops.planned)]
        assert_same(
            *[torch.utils._pytree.tree_map_only(torch.Tensor, torch.detach, each) for each in answers],
            "outputs",
        )
        assert not answers[1]["b"][1].requires_grad
        assert answers[1]["same"] is x
        for answer in answers:
            (answer["a"].sum() if attempt % 2 else answer["a"].sum() + answer["b"][0].prod()).backward()
        loops.compare_gradients()
        for optimizer in loops.optimizers:
            optimizer.zero_grad()
    loops.assert_served()


def test_inputs_that_want_a_gradient():
    loops = Loops(SmallNet(), images(1)[0][0].requires_grad_())
    for image, target in images(20):
        loops.planned.poison()
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
    for x, y in vectors(20):
        loops.planned.poison()
        for module, model in ((loops.eager, loops.eager), (loops.planned, loops.model)):
            F.cross_entropy(module(x), y).backward(inputs=[model[2].weight])
        loops.compare_gradients()
    loops.assert_served()


def test_a_model_within_a_larger_one():
    """Gradients flow into the planned part's inputs and out of its outputs."""
    eager = nn.Sequential(nn.Linear(6, 6), mlp(), nn.Linear(3, 3))
    planned = copy.deepcopy(eager)
    inner = olla_fx.optimize(planned[1], torch.ones(4, 6, requires_grad=True), solver="none")
    for x, y in vectors(20):
        inner.poison()
        F.cross_entropy(eager(x), y).backward()
        F.cross_entropy(planned[2](inner(planned[0](x))), y).backward()
        for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")
    assert inner.binding == "buffer"
    assert inner.counts.served > 0
    assert inner.counts.outside == 0


def test_a_forward_in_another_thread_while_the_buffer_is_busy():
    loops = Loops(SmallNet(0.0), images(1)[0][0]).run(images(2))
    others = images(20, batch=2)[::-1]
    for (image, target), other in zip(images(20), others, strict=True):
        for optimizer in loops.optimizers:
            optimizer.zero_grad()
        first = loops.losses(image, target)
        assert loops.planned.is_busy
        second = []
        thread = threading.Thread(target=lambda other=other, found=second: found.extend(loops.losses(*other)))
        thread.start()
        thread.join()
        for eager, planned in (second, first):
            eager.backward()
            planned.backward()
        loops.compare_gradients()
        for optimizer in loops.optimizers:
            optimizer.step()
    assert_same_models(loops.eager, loops.model)
    assert loops.planned.stock_runs == 20
    loops.planned.stock_runs = 0
    loops.assert_served()


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


@pytest.mark.parametrize("reduce", [torch.sum, lambda output: output.square().sum()], ids=["sum", "squares"])
def test_gradients_of_gradients_are_refused(reduce):
    """A sum's tangent wants no gradient: a penalty on the gradient must not be lost for that."""
    loops = Loops(mlp(), vectors(1)[0][0])
    loss = reduce(loops.planned(vectors(1)[0][0]))
    (gradient,) = torch.autograd.grad(loss, [loops.model[0].weight], create_graph=True)
    with pytest.raises(BackwardError, match="gradients of gradients"):
        (gradient.square().sum() + loops.model[0].weight.sum()).backward()
    del gradient, loss
    loops.model.zero_grad()
    loops.run(vectors(20))
    loops.assert_served()


@pytest.mark.parametrize("of", ["input", "weight", "tangent"])
def test_gradients_of_gradients_are_refused_for_whatever_they_are_asked(of):
    """A physics-informed loss asks for the second derivative by the inputs: it is no constant."""
    x = vectors(1)[0][0].requires_grad_()
    loops = Loops(mlp(), x)
    answer = loops.planned(x)
    tangent = torch.ones_like(answer).requires_grad_()
    (gradient,) = torch.autograd.grad(answer, x, tangent, create_graph=True)
    source = {"input": x, "weight": loops.model[0].weight, "tangent": tangent}[of]
    with pytest.raises(BackwardError, match="gradients of gradients"):
        torch.autograd.grad(gradient.sum(), source, allow_unused=True)
    del gradient, answer
    assert not loops.planned.is_busy


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_might_be_differentiated_and_is_not():
    loops = Loops(mlp(), vectors(1)[0][0])
    for batch in vectors(3):
        for loss in loops.losses(*batch):
            loss.backward(create_graph=True)
        loops.compare_gradients()
        for model in (loops.eager, loops.model):
            model.zero_grad()


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
    loops.run(images(20))
    loops.assert_served()


def test_evaluation_in_between():
    loops = Loops(SmallNet(), images(1)[0][0])
    for _ in range(4):
        loops.run(images(5))
        for module in (loops.eager, loops.planned):
            module.eval()
        for image, _ in images(3):
            loops.planned.poison()
            with torch.no_grad():
                assert_same(loops.eager(image), loops.planned(image), "evaluation")
        for module in (loops.eager, loops.planned):
            module.train()
    loops.run(images(2))
    loops.assert_served()
    assert loops.planned.replans == 0


def test_frozen_statistics_and_layers():
    """Some modules in eval mode, then a layer frozen and unfrozen again."""
    loops = Loops(SmallNet(), images(1)[0][0]).run(images(5))
    for model in (loops.eager, loops.model):
        model.norm.eval()
    loops.run(images(5))
    for wanted in (False, True):
        for model in (loops.eager, loops.model):
            model.conv.requires_grad_(wanted)
            model.zero_grad()
        loops.run(images(5))
    loops.assert_served()


def test_shapes_are_planned_once_each():
    loops = Loops(SmallNet(), images(1, size=8)[0][0])
    for _ in range(7):
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
    for batch in images(10):
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


class Written(nn.Module):
    """A model given by a function of its modules and inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        self.l, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        for name, part in parts.items():
            if (
                isinstance(part, torch.Tensor)
                and not isinstance(part, nn.Parameter)
                and not part.requires_grad
            ):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def both(function, use, steps=3, context=nullcontext, **parts):
    """Use a model and its planned twin in the same way; compare all gradients."""
    torch.manual_seed(0)
    model = Written(function, **parts)
    loops = Loops(model, torch.randn(4, 6))
    for step in range(steps):
        x = torch.randn(4, 6)
        for module, own in ((loops.eager, loops.eager), (loops.planned, loops.model)):
            torch.manual_seed(step)
            with context():
                answer = module(x)
            use(answer, own)
        loops.compare_gradients()
    assert not loops.planned.is_busy
    return loops


def test_gradients_that_are_one_tensor_are_separated():
    def shared(self, x):
        return F.linear(x, self.a + self.b)

    parts = {name: nn.Parameter(torch.randn(6, 6)) for name in "ab"}
    loops = both(shared, lambda answer, _: answer.square().sum().backward(), **parts)
    loops.model.a.grad.zero_()
    assert loops.model.b.grad.abs().sum() > 0


def test_tensors_that_want_a_gradient_and_are_no_parameters():
    def scaled(self, x):
        return self.l(x) * self.scale

    loops = both(scaled, lambda answer, _: answer.sum().backward(), scale=torch.ones(6, requires_grad=True))
    assert_same(loops.eager.scale.grad, loops.model.scale.grad, "gradient of an attribute")


def test_a_buffer_that_was_updated_again_before_backward():
    def state(self, x):
        self.st.mul_(0.5).add_(x.detach().mean(0))
        return self.l(x) * self.st

    planned = olla_fx.optimize(Written(state, st=torch.ones(6)), torch.ones(4, 6), solver="none")
    first, second = planned(torch.randn(4, 6)), planned(torch.randn(4, 6))
    second.sum().backward()
    with pytest.raises(RuntimeError, match="changed in place"):
        first.sum().backward()
    assert not planned.is_busy


def use_both(answer, _):
    first, second = answer
    first.mul_(2)
    (second.square().sum() + first.sum()).backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (lambda h: (h, h.view(-1)))(self.l(x)),
        lambda self, x: (lambda h: (h, h))(self.l(x)),
        lambda self, x: (lambda h: (h[:2], h))(self.l(x)),
        lambda self, x: (lambda h: (h, h.t()[1:3]))(self.l(x)),
    ],
    ids=["view", "same", "part first", "transposed part"],
)
def test_outputs_in_one_storage_that_are_changed_in_place(function):
    both(function, use_both)


def pictures_to_pictures():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.ReLU(), nn.Conv2d(8, 2, 1)
    return nn.Sequential(*layers)


LAST = torch.channels_last


def maps(outputs, target):
    return F.cross_entropy(outputs, target)


def rows(outputs, target):
    return F.cross_entropy(outputs.permute(0, 2, 3, 1).reshape(-1, 2), target.flatten())


def means(outputs, target):
    return F.cross_entropy(outputs.mean((2, 3)), target[:, 0, 0])


@pytest.mark.parametrize(
    ("loss_fn", "memory_format", "context"),
    [
        (maps, LAST, nullcontext),
        (means, LAST, nullcontext),
        (rows, torch.contiguous_format, nullcontext),
        (maps, LAST, partial(torch.autocast, "cpu", torch.bfloat16)),
    ],
)
def test_gradients_come_in_another_layout_than_the_output_has(loss_fn, memory_format, context):
    """The first forward is repeated for it, with its random numbers and statistics."""
    model = pictures_to_pictures().to(memory_format=memory_format)
    batches = [
        (torch.randn(size, 3, 16, 16).to(memory_format=memory_format), torch.randint(2, (size, 16, 16)))
        for size in [4, 4, 1, 4] * 5
    ]
    with context():
        loops = Loops(model, batches[0][0], make=optim.AdamW, loss_fn=loss_fn, context=context)
    loops.run(batches)
    loops.assert_served()
    assert_same(*(dict(each.named_buffers()) for each in (loops.eager, loops.model)), "statistics")


def test_a_repeated_forward_may_be_differentiated_twice():
    loops = Loops(pictures_to_pictures().to(memory_format=LAST), images(1)[0][0].to(memory_format=LAST))
    for step in range(3):
        target = torch.randint(2, (2, 8, 8))
        for loss in loops.losses(images(3)[step][0].to(memory_format=LAST), target):
            loss.backward(retain_graph=True)
            loss.backward()
        loops.compare_gradients()
    assert not loops.planned.is_busy


def test_gradients_come_in_other_layouts_again_and_again():
    """A sum's gradient is one number spread out, the next one is not, and several forwards wait together."""
    loops = Loops(mlp(), vectors(1)[0][0])
    losses = [
        torch.sum,
        lambda answer: answer.square().mean(),
        torch.mean,
        lambda answer: answer.t()[0].sum(),
    ]
    for x, _ in vectors(5):
        for optimizer in loops.optimizers:
            optimizer.zero_grad()
        for module in (loops.eager, loops.planned):
            answers = [module(x + index) for index, _ in enumerate(losses)]
            for loss, answer in zip(losses, answers, strict=True):
                loss(answer).backward()
        loops.compare_gradients()
        for optimizer in loops.optimizers:
            optimizer.step()
    assert_same_models(loops.eager, loops.model)
    # Of four forwards that wait together one has the buffer.
    assert (loops.planned.binding, loops.planned.stock_runs) == ("buffer", 15)
    assert loops.planned.counts.served > 0


class Shifted(nn.Module):
    """Its backward reads no input."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x + self.shift, x * 2 + self.shift


def test_a_spread_gradient_leaves_no_place_for_another():
    x = vectors(1)[0][0]
    planned = olla_fx.optimize(Shifted(), x, solver="none")
    for _ in range(2):
        answer, other = planned(x)
        (answer.sum() + other.mean()).backward()
    answer = planned(x)[0]
    planned.shift.grad = None
    answer.sum().backward()  # the other output's gradient is zero, in the layout that was planned
    assert_same(planned.shift.grad, torch.full((6,), 4.0), "gradient")
    answer = planned(x)[0]
    x.zero_()
    with pytest.raises(BackwardError, match="another memory layout"):
        answer.square().sum().backward()
    del answer
    assert not planned.is_busy


@pytest.mark.parametrize("change", ["input", "mode"])
def test_a_forward_that_cannot_be_repeated(change):
    """What it read has changed; its gradients are those of the planned layout."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)).to(memory_format=LAST)
    x = images(1)[0][0].to(memory_format=LAST)
    loops = Loops(model, x)
    for module in (loops.eager, loops.planned):
        given = x.clone()
        loss = maps(module(given), torch.ones(2, 8, 8, dtype=torch.long))
        if change == "input":
            given.zero_()
        module.train(change != "mode")
        loss.backward()
    pairs = zip(loops.eager.parameters(), loops.model.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad) for one, other in pairs)


class Centred(nn.Module):
    """Hands a parameter out for its loss, which nothing else in forward reads."""

    def __init__(self):
        super().__init__()
        self.body, self.centres = mlp(), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return {"answer": self.body(x), "centres": self.centres}


def test_an_output_that_is_a_parameter():
    def centre_loss(outputs, target):
        return (
            F.cross_entropy(outputs["answer"], target)
            + (outputs["answer"] - outputs["centres"][target]).square().mean()
        )

    loops = Loops(Centred(), vectors(1)[0][0], loss_fn=centre_loss)
    loops.run(vectors(20))
    loops.assert_served()


def test_an_output_that_is_an_input():
    loops = Loops(Written(lambda self, z: (self.l(z * 2), z, z[1:])), torch.ones(4, 6, requires_grad=True))
    for _ in range(3):
        start = torch.randn(4, 6)
        gradients = []
        for module in (loops.eager, loops.planned):
            leaf = start.clone().requires_grad_()
            y = leaf * 1.5
            a, b, c = module(y)
            assert b is y
            c.mul_(3)
            (a.sum() + b.square().sum()).backward()
            gradients.append(leaf.grad)
        assert_same(*gradients, "gradient of the input")
        loops.compare_gradients()


def test_autocast_keeps_the_weights_that_it_has_cast():
    both(
        lambda self, x: self.l(self.l(x).relu()),
        lambda answer, _: answer.float().square().sum().backward(),
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )


def test_a_number_read_from_a_tensor_crosses_the_hand_over():
    both(lambda self, x: self.l(x) * x.sum().item(), lambda answer, _: answer.sum().backward())


def test_no_gradient_from_outputs_that_nobody_used():
    loops = both(lambda self, x: (self.l(x), self.k(x)), lambda answer, _: answer[0].sum().backward())
    assert loops.model.k.weight.grad is None
    first, _ = loops.planned(torch.randn(4, 6))
    found = torch.autograd.grad(first.sum(), [loops.model.l.weight, loops.model.k.weight], allow_unused=True)
    assert found[0] is not None
    assert found[1] is None


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, scale=1.0, shift=None):
            hidden = self.body(x) * scale
            return hidden if shift is None else hidden + shift

    planned = olla_fx.optimize(Named(), torch.ones(4, 6), solver="none")
    model = planned._model
    x, shift = torch.randn(4, 6), torch.randn(3)
    for named in ({"x": x}, {"x": x, "scale": 2.0}, {"shift": shift, "x": x}):
        assert_same(model(**named).detach(), planned(**named).detach(), str(named))
    assert_same(model(x, scale=0.5).detach(), planned(x, scale=0.5).detach(), "mixed")
    with pytest.raises(StepInputError, match="unexpected keyword"):
        planned(x, size=3)


@pytest.mark.parametrize("leaf", [object(), torch.ones(2).to_sparse()])
def test_inputs_that_do_not_tell_calls_apart(leaf):
    planned = olla_fx.optimize(Written(lambda self, x, *_: self.l(x)), torch.ones(4, 6), solver="none")
    with pytest.raises(StepInputError, match="pass"):
        planned(torch.ones(4, 6), leaf)


def test_a_signed_zero_is_another_number():
    planned = olla_fx.optimize(
        Written(lambda self, x, c: torch.copysign(self.l(x), torch.full((6,), c))), (torch.ones(4, 6), 0.0)
    )
    positive, negative = (planned(torch.ones(4, 6), c).detach() for c in (0.0, -0.0))
    assert_same(positive, -negative, "sign")


def test_the_buffer_cannot_be_poisoned_while_it_is_needed():
    planned = olla_fx.optimize(mlp(), torch.ones(4, 6))
    answer = planned(torch.ones(4, 6))
    with pytest.raises(StepModeError, match="still needs"):
        planned.poison()
    answer.sum().backward()
    planned.poison()


@pytest.mark.parametrize("most_plans", [0, -1, 1.5, None, "x", True])
def test_limits_of_plans_without_a_meaning(most_plans):
    with pytest.raises(OptionError, match="most_plans"):
        olla_fx.optimize(mlp(), torch.ones(4, 6), most_plans=most_plans)
