"""Gradients that the planned backward adds to ``.grad`` itself, and those that autograd must see."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.arena import Buffer, record_events
from olla_fx.eager.baseline import baseline_from_events
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import SmallNet, Written, images, mlp, vectors
from tests.olla_fx.run.own_loop.written import two_layers


def wide() -> nn.Sequential:
    """Return a network whose gradients outweigh its activations."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))


def accumulate(pair: OwnLoop, batches: list[tuple[torch.Tensor, ...]], *, update: bool = True) -> None:
    """Run one backward a batch of both, and compare what has been added up after each."""
    for batch in batches:
        for loss in pair.losses(batch):
            loss.backward()
        pair.compare_gradients()
    if update:
        pair.update()


def live_peaks(pair: OwnLoop, batch: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Return the live peaks of a forward and backward of eager and of the planned model."""
    x, y = batch
    peaks = []
    for called, _, _ in pair.sides():
        with record_events() as recording:
            F.cross_entropy(called(x), y).backward()
        served = pair.step.stats.counts.served if called is pair.step else 0
        assert served or called is not pair.step
        peaks.append(baseline_from_events(recording.events).live_peak_bytes)
    return peaks[0], peaks[1]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before forward", "before backward", "after the update"])
def test_accumulation_is_exact_wherever_gradients_are_cleared(when: str, set_to_none: bool):
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    batches = images(3)
    for _ in range(4):
        for index, batch in enumerate(batches):
            if index == 0 and when == "before forward":
                for _, _, optimizer in pair.sides():
                    optimizer.zero_grad(set_to_none=set_to_none)
            losses = pair.losses(batch)
            if index == 0 and when == "before backward":
                for _, _, optimizer in pair.sides():
                    optimizer.zero_grad(set_to_none=set_to_none)
            for loss in losses:
                loss.backward()
            pair.compare_gradients()
        pair.update()
        if when == "after the update":
            for _, _, optimizer in pair.sides():
                optimizer.zero_grad(set_to_none=set_to_none)
    pair.assert_served()


def test_accumulating_holds_no_second_set_of_gradients():
    batches = vectors(4, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0])
    for _ in range(3):
        pair.zero_grad()
        accumulate(pair, batches)
    pair.zero_grad()
    accumulate(pair, batches[:3], update=False)
    assert pair.step.plan.output_bytes < 1024, "gradients belong in the buffer"
    eager, planned = live_peaks(pair, batches[3])
    pair.compare_gradients()
    assert planned <= eager


def test_the_first_accumulation_holds_no_second_set_either():
    batches = vectors(2, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0])
    accumulate(pair, batches[:1], update=False)
    gradients = sum(parameter.grad.nbytes for parameter in pair.model.parameters())
    eager, planned = live_peaks(pair, batches[1])
    pair.compare_gradients()
    assert planned <= eager + pair.step.plan.buffer_bytes
    assert planned < 2 * gradients


def test_gradients_of_the_parameters_own_layout():
    pair = OwnLoop(SmallNet().to(memory_format=torch.channels_last), images(1)[0][0])
    for _ in range(3):
        pair.zero_grad()
        accumulate(pair, images(2))
        for eager, planned in zip(pair.eager.parameters(), pair.model.parameters(), strict=True):
            if eager.grad is not None:
                assert eager.grad.stride() == planned.grad.stride()


Watch = Callable[[nn.Parameter, list[torch.Tensor]], object]


def watch_by_hook(parameter: nn.Parameter, seen: list[torch.Tensor]) -> object:
    return parameter.register_hook(lambda gradient: seen.append(gradient.clone()))


def scale_by_hook(parameter: nn.Parameter, seen: list[torch.Tensor]) -> object:
    def scale(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return gradient * 3

    return parameter.register_hook(scale)


def watch_the_sum(parameter: nn.Parameter, seen: list[torch.Tensor]) -> object:
    return parameter.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))


def watch_the_node(parameter: nn.Parameter, seen: list[torch.Tensor]) -> object:
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_hook(lambda _, gradients: seen.append(gradients[0].clone()))
    return node


@pytest.mark.parametrize("watch", [watch_by_hook, scale_by_hook, watch_the_sum, watch_the_node])
def test_hooks_see_what_they_see_in_eager(watch: Watch):
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    for _ in range(2):
        pair.zero_grad()
        accumulate(pair, vectors(2))
    seen: list[list[torch.Tensor]] = []
    handles = []
    for _, model, _ in pair.sides():
        seen.append([])
        handles.append(watch(model[0].weight, seen[-1]))
    accumulate(pair, vectors(3))
    assert len(seen[0]) == len(seen[1]) == 3
    assert all(map(torch.equal, *seen))


def test_autograd_grad_leaves_grad_alone():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    accumulate(pair, vectors(3))
    results = []
    losses = pair.losses(vectors(1)[0])
    for loss, (_, model, _) in zip(losses, pair.sides(), strict=True):
        before = [parameter.grad.clone() for parameter in model.parameters()]
        results.append(torch.autograd.grad(loss, list(model.parameters())))
        assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))
    assert all(map(torch.equal, *results))


def test_backward_for_chosen_inputs_reaches_these_alone():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    accumulate(pair, vectors(3))
    pair.zero_grad()
    for loss, (_, model, _) in zip(pair.losses(vectors(1)[0]), pair.sides(), strict=True):
        loss.backward(inputs=[model[0].weight])
        assert model[0].bias.grad is None
    pair.compare_gradients()


def test_a_parameter_that_the_loss_uses_too():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    for _ in range(4):
        for loss, (_, model, _) in zip(pair.losses(vectors(1)[0]), pair.sides(), strict=True):
            (loss + 0.1 * model[0].weight.square().sum()).backward()
        pair.compare_gradients()


def test_two_forwards_whose_losses_share_a_backward():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    first, second = vectors(2)
    for _ in range(4):
        for ours, theirs in zip(pair.losses(first), pair.losses(second), strict=True):
            (ours + theirs).backward()
        pair.compare_gradients()


def test_losses_that_are_kept():
    pair = OwnLoop(wide(), vectors(1, width=64)[0][0])
    kept = []
    for index in range(20):
        losses = pair.losses(vectors(1, width=64)[0])
        for loss in losses:
            loss.backward()
        kept.append(losses)
        pair.compare_gradients()
        in_buffer = pair.step.plan.output_bytes < 1024
        assert in_buffer or index < 3 or index > 16
    pair.assert_served()


def test_a_retained_backward_accumulates():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    for _ in range(3):
        losses = pair.losses(vectors(1)[0])
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        pair.compare_gradients()


def test_an_output_that_is_not_used_leaves_its_gradients_alone():
    model = two_layers(lambda self, x: (self.first(x), self.second(x)))
    pair = OwnLoop(model, torch.ones(4, 6))
    for _ in range(3):
        for called, _, _ in pair.sides():
            called(torch.ones(4, 6))[0].sum().backward()
        pair.compare_gradients()
        assert pair.model.second.weight.grad is None


def test_frozen_and_unfrozen_between_backwards():
    pair = OwnLoop(mlp(), torch.ones(4, 6))
    for step in range(6):
        pair.change(lambda model, step=step: model[0].requires_grad_(step % 2 == 0))
        accumulate(pair, vectors(1), update=False)


def test_new_gradients_lie_in_the_buffer_while_the_loop_clears_them_first():
    batches = vectors(3, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches)
    pair.assert_served()
    assert pair.step.stats.counts.outputs == 1
    pair.zero_grad()
    eager, _ = live_peaks(pair, batches[0])
    pair.compare_gradients()
    assert pair.step.plan.buffer_bytes + pair.step.plan.output_bytes <= 1.01 * eager


def test_gradients_survive_what_else_runs_in_the_buffer():
    batches = vectors(3, width=64, classes=4)
    first, second = (OwnLoop(wide(), batches[0][0]).run(batches) for _ in range(2))
    before = [parameter.grad for parameter in first.model.parameters()]
    second.run(batches)
    first.compare_gradients()
    for parameter, gradient in zip(first.model.parameters(), before, strict=True):
        assert parameter.grad is gradient, "moved, not replaced"
    first.run(batches)
    first.model.eval()
    first.step(batches[0][0])
    first.compare_gradients()


def test_gradients_that_the_caller_keeps():
    batches = vectors(6, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches)
    kept: list[list[torch.Tensor]] = []
    copies: list[list[torch.Tensor]] = []
    for batch in batches:
        pair.train(batch)
        kept.append([parameter.grad for parameter in pair.model.parameters()])
        copies.append([gradient.clone() for gradient in kept[-1]])
    for gradients, as_they_were in zip(kept, copies, strict=True):
        assert all(map(torch.equal, gradients, as_they_were))


def test_gradients_of_another_thread_stay_where_they_are():
    batches = vectors(3, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches)
    addresses = [parameter.grad.data_ptr() for parameter in pair.model.parameters()]
    other = OwnLoop(wide(), batches[0][0])
    thread = threading.Thread(target=other.run, args=(batches,))
    thread.start()
    thread.join()
    other.assert_served()
    assert addresses == [parameter.grad.data_ptr() for parameter in pair.model.parameters()]
    pair.compare_gradients()


def held_bytes() -> int:
    """Return the bytes of all buffers that exist."""
    gc.collect()
    return sum(buffer.buffer_bytes for buffer in gc.get_objects() if type(buffer) is Buffer)


def test_gradients_kept_over_steps_cost_no_buffer_each():
    batches = vectors(7, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches[:4])
    history, sizes = [], []
    for batch in batches:
        pair.train(batch)
        history.append((pair.model[0].bias.grad, pair.eager[0].bias.grad))
        pair.assert_served()
        sizes.append(held_bytes())
    for planned, eager in history:
        assert torch.equal(planned, eager)
    assert sizes[-1] == sizes[1]


def test_gradients_of_inputs_that_are_kept():
    """As for saliency maps: the inputs are gone, their gradients are not."""
    batches = vectors(10, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0].clone().requires_grad_())
    kept, sizes = [], []
    for x, y in batches:
        pair.zero_grad()
        maps = []
        for called, _, _ in pair.sides():
            leaf = x.clone().requires_grad_()
            F.cross_entropy(called(leaf), y).backward()
            maps.append(leaf.grad)
        kept.append(maps)
        sizes.append(held_bytes())
    for eager, planned in kept:
        assert torch.equal(eager, planned)
    assert sizes[-1] <= 1.1 * sizes[2]


@pytest.mark.parametrize("view", [lambda grad: grad.view(-1), torch.Tensor.detach, lambda grad: grad.data])
def test_views_of_gradients_stay_views(view: Callable[[torch.Tensor], torch.Tensor]):
    batches = vectors(8, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches[:3])
    other = OwnLoop(wide(), batches[0][0]).run(batches[:3])
    for batch in batches:
        pair.train(batch)
        views = [view(model[0].weight.grad) for _, model, _ in pair.sides()]
        other.train(batch)
        for _, model, _ in pair.sides():
            model[0].weight.grad.mul_(2)
        assert torch.equal(*views)
        pair.compare_gradients()
    pair.assert_served()
    assert pair.step.stats.counts.outputs > 1, "gradients whose views are kept are made outside"


class SavedInput(torch.autograd.Function):
    """Hands its saved input on as the gradient of a weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, x


def test_a_gradient_that_is_the_callers_own_tensor_is_copied():
    x = torch.rand(4, 6)
    pair = OwnLoop(Written(lambda self, x: SavedInput.apply(x, self.w), w=nn.Parameter(torch.rand(4, 6))), x)
    before = x.clone()
    for _ in range(3):
        pair.zero_grad()
        for called, model, _ in pair.sides():
            called(x).sum().backward()
            model.w.grad.mul_(2)
            assert torch.equal(x, before)
        pair.compare_gradients()


def test_a_module_that_is_gone_leaves_gradients_alone():
    batches = vectors(3, width=64, classes=4)
    pair = OwnLoop(wide(), batches[0][0]).run(batches)
    eager, model = pair.eager, pair.model
    del pair
    small = OwnLoop(mlp(), torch.ones(4, 6)).run(vectors(3))
    small.assert_served()
    for expected, given in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, given.grad)
