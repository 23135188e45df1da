"""Incoming gradients that lie in another memory layout than was planned, in the caller's own loop.

They are copied into the planned layout that once: gradients equal eager's up to the order of a sum. The step
is planned for the new layout, and from then on equals eager's bit for bit.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from olla_fx.errors import BackwardError
from tests.olla_fx.comparisons import assert_close, assert_same
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import Written, mlp, vectors

CHANNELS_LAST = torch.channels_last


class Segmenter(nn.Module):
    """Depends on a number, a statistic that it updates, random numbers and its training flag."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.scale = nn.Conv2d(8, 2, 1), 1.0
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls.add_(1)
        hidden = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return self.last(hidden * self.calls) * self.scale


def pixels(count=1, size=2, memory_format=CHANNELS_LAST):
    """Return images with a label for each pixel."""
    return [
        (torch.randn(size, 3, 8, 8).to(memory_format=memory_format), torch.randint(2, (size, 8, 8)))
        for _ in range(count)
    ]


def segmenter(memory_format=CHANNELS_LAST, **options):
    model = Segmenter().to(memory_format=memory_format)
    return OwnLoop(model, pixels(memory_format=memory_format)[0][0], **options)


def train_closely(pair, batch):
    """Run a step whose gradients come in a new layout; then let the planned half go on with eager's."""
    pair.zero_grad()
    for loss in pair.losses(batch):
        loss.backward()
    pair.compare_gradients(assert_close)
    for eager, planned in zip(pair.eager.parameters(), pair.model.parameters(), strict=True):
        if eager.grad is not None:
            planned.grad.copy_(eager.grad)
    pair.update()


def settle(pair, batch):
    """Train on gradients of one layout until all is served, and equal to eager to the last bit."""
    pair.eager.load_state_dict(pair.model.state_dict())
    for _ in range(3):
        train_closely(pair, batch)
    pair.run([batch] * 3)
    assert not pair.step.stats.is_busy
    assert pair.step.stats.binding == "buffer"
    assert pair.step.stats.counts.outside == 0, pair.step.stats.outside_log


def pixel_loss(outputs, target):
    """Compute a loss whose gradient is contiguous although outputs may be channels-last."""
    return F.cross_entropy(outputs, target)


def row_loss(outputs, target):
    return F.cross_entropy(outputs.permute(0, 2, 3, 1).reshape(-1, 2), target.flatten())


def mean_loss(outputs, target):
    return F.cross_entropy(outputs.mean((2, 3)), target[:, 0, 0])


def sum_loss(outputs, target):
    """Compute a loss whose gradient is one number with strides of zero."""
    return outputs.sum() / target.numel()


@pytest.mark.parametrize(
    ("loss_fn", "memory_format", "sizes", "context"),
    [
        (pixel_loss, CHANNELS_LAST, [2, 1], nullcontext),
        (mean_loss, CHANNELS_LAST, [2], nullcontext),
        (row_loss, torch.contiguous_format, [2], nullcontext),
        (sum_loss, CHANNELS_LAST, [2], nullcontext),
        (pixel_loss, CHANNELS_LAST, [2], partial(torch.autocast, "cpu", torch.bfloat16)),
    ],
    ids=["pixels", "means", "rows", "sum", "autocast"],
)
def test_only_the_first_backward_of_a_layout_is_rounded_differently(loss_fn, memory_format, sizes, context):
    with context():
        pair = segmenter(memory_format, make_optimizer=optim.AdamW, loss_fn=loss_fn, context=context)
    batches = {size: pixels(4, size, memory_format) for size in sizes}
    for size in sizes:
        train_closely(pair, batches[size][0])
    for size in sizes * 3:
        pair.run(batches[size])
    pair.assert_served()


@pytest.mark.parametrize("loss_fn", [pixel_loss, sum_loss])
def test_a_backward_that_is_repeated(loss_fn):
    pair = segmenter(loss_fn=loss_fn)
    for index, batch in enumerate(pixels(4)):
        pair.zero_grad()
        for loss in pair.losses(batch):
            loss.backward(retain_graph=True)
            loss.backward()
        pair.compare_gradients(assert_same if index else assert_close)
    assert not pair.step.stats.is_busy
    assert pair.step.stats.binding == "buffer"


LOSSES = [torch.sum, lambda answer: answer.square().mean(), torch.mean, lambda answer: answer.t()[0].sum()]
"""Their gradients lie in several layouts."""


def test_layouts_that_alternate_are_not_planned_for_again_and_again():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    graph_modules = []
    for _ in range(5):
        for loss in LOSSES:

            def loop(called, _, loss=loss):
                loss(called(vectors(1)[0][0])).backward()

            pair.run_loop(loop, assert_close)
            graph_modules.append(pair.step.graph_module)
    assert len({id(graph_module) for graph_module in graph_modules[-8:]}) <= pair.step.stats.cached_plans
    assert pair.step.stats.binding == "buffer"
    assert pair.step.stats.counts.served > 0
    settle(pair, vectors(1)[0])


def test_forwards_that_wait_together_for_gradients_of_several_layouts():
    pair = OwnLoop(mlp(), vectors(1)[0][0])

    def loop(called, model):
        model.zero_grad()
        answers = [called(vectors(1)[0][0] + index) for index, _ in enumerate(LOSSES)]
        for loss, answer in zip(LOSSES, answers, strict=True):
            loss(answer).backward()

    for _ in range(5):
        pair.run_loop(loop, assert_close)
    # Of four forwards that wait together one has the buffer.
    assert pair.step.stats.stock_runs == 15
    assert pair.step.stats.counts.served > 0


def test_gradients_of_one_graph_in_several_layouts():
    pair = segmenter()
    batch = pixels()[0]

    def loop(called, model):
        model.zero_grad()
        answer = called(batch[0])
        answer.sum().backward(retain_graph=True)
        torch.rand(3)
        answer.square().mean().backward(retain_graph=True)
        pixel_loss(answer, batch[1]).backward()

    for _ in range(3):
        pair.run_loop(loop, assert_close)
    settle(pair, batch)


def test_outputs_that_a_backward_does_not_use():
    """Their gradients are zero in the layout that was planned."""
    pair = OwnLoop(
        Written(lambda self, x: (x + self.shift, x * 2 + self.shift), shift=nn.Parameter(torch.zeros(6))),
        vectors(1)[0][0],
    )

    def use_both(answer, other):
        return answer.sum() + other.mean()

    def use_first(answer, _):
        return answer.sum()

    def use_other(_, other):
        return other.square().sum()

    for use in (use_both, use_both, use_first, use_other, use_first, use_both):

        def loop(called, model, use=use):
            model.zero_grad()
            use(*called(vectors(1)[0][0])).backward()

        pair.run_loop(loop, assert_close)


def switch_mode(_, model, is_changed):
    model.train(not is_changed)


def set_number(_, model, is_changed):
    model.scale = 0.25 if is_changed else 1.0


def freeze(_, model, is_changed):
    model.first.requires_grad_(not is_changed)


@pytest.mark.parametrize("change", [switch_mode, set_number, freeze])
def test_a_model_that_changes_between_forward_and_backward(change):
    """There is a plan for the other state, too, which that backward must not take."""
    pair = segmenter()
    x, y = pixels()[0]

    def loop(called, model):
        change(called, model, True)
        for _ in range(2):
            pixel_loss(called(x), y).backward()
        change(called, model, False)
        model.zero_grad()
        loss = pixel_loss(called(x), y)
        change(called, model, True)
        loss.backward()
        change(called, model, False)

    for _ in range(2):
        pair.run_loop(loop, assert_close)


def test_values_that_change_unseen_between_forward_and_backward():
    """Through ``.data``, which autograd does not count."""
    pair = segmenter()
    example, y = pixels()[0]
    for name in ("first.weight", "first.bias", "last.weight", "x"):

        def loop(called, model, name=name):
            x = example.clone(memory_format=torch.preserve_format)
            for loss_fn in (pixel_loss, sum_loss):
                loss = loss_fn(called(x), y)
                (x if name == "x" else model.get_parameter(name)).data.mul_(-1)
                loss.backward()

        pair.run_loop(loop, assert_close)


def test_a_gradient_of_a_sum_and_values_that_change_unseen():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    x = vectors(1)[0][0]

    def loop(called, model):
        for _ in range(2):
            called(x).sum().backward()
        model.zero_grad()
        loss = called(x).square().sum()
        next(model.parameters()).data.zero_()
        loss.backward()

    pair.run_loop(loop, assert_close)


@pytest.mark.parametrize("change", ["input", "mode"])
def test_an_input_or_mode_that_changes_before_backward(change):
    layers = nn.ReLU(), nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)
    x, y = pixels()[0]
    pair = OwnLoop(nn.Sequential(*layers).to(memory_format=CHANNELS_LAST), x)

    def loop(called, _):
        given = x.clone()
        loss = pixel_loss(called(given), y)
        if change == "input":
            given.zero_()
        called.train(change != "mode")
        loss.backward()

    pair.run_loop(loop, assert_close)


def test_gradients_of_conjugated_outputs():
    weight = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
    x = torch.randn(4, 5, dtype=torch.complex64)
    pair = OwnLoop(Written(lambda self, x: x @ self.weight, weight=weight), x)

    def loop(called, _):
        for _ in range(3):
            called(x).conj().sum().real.backward()
            (called(x).conj().imag.sum() + called(x).imag.sum()).backward()

    pair.run_loop(loop, assert_close)


class OverlappingGradient(torch.autograd.Function):
    """A sum whose gradient has several elements in one place, and yet no stride of 0."""

    @staticmethod
    def forward(ctx, answer):
        ctx.shape = answer.shape
        return answer.sum()

    @staticmethod
    def backward(ctx, gradient):
        rows, columns = ctx.shape
        return (torch.arange(float(rows + columns)) * gradient).as_strided(ctx.shape, (1, 1))


def test_gradients_that_overlap():
    x = torch.randn(4, 5)
    pair = OwnLoop(nn.Sequential(nn.Linear(5, 6)), x)

    def loop(called, _):
        for _ in range(3):
            OverlappingGradient.apply(called(x)).backward()
            called(x).square().sum().backward()

    pair.run_loop(loop, assert_close)


def test_a_sparse_gradient_is_refused():
    step = OwnLoop(mlp(), vectors(1)[0][0]).step
    loss = F.embedding(torch.tensor([1, 3]), step(vectors(1)[0][0]), sparse=True).sum()
    with pytest.raises(BackwardError, match="sparse"):
        loss.backward()
    assert not step.stats.is_busy


def test_a_plan_that_is_evicted_before_its_backward():
    x = vectors(1)[0][0]
    pair = OwnLoop(mlp(), x, cache_size_limit=1)

    def loop(called, _):
        for power in (1, 1, 2, 1):
            answer = called(x)
            called(x[:1])
            answer.pow(power).sum().backward()

    pair.run_loop(loop, assert_close)
    settle(pair, vectors(1)[0])


def test_anomaly_detection():
    pair = segmenter()
    x, y = pixels()[0]

    def loop(called, _):
        with torch.autograd.detect_anomaly():
            pixel_loss(called(x), y).backward()
            called(x[:1]).sum().backward()
        assert not torch.is_anomaly_enabled()

    pair.run_loop(loop, assert_close)
    settle(pair, (x, y))
