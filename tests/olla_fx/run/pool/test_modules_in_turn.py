"""Planned modules of one process share buffers: they need the largest, or what is needed at the same time."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.run.pool import pool_of
from tests.olla_fx.comparisons import assert_close, assert_same, assert_same_models
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import MOMENTUM, SmallNet, images, mlp, sgd, vectors

BATCHES = 2, 6, 4


def test_own_loops_in_turn_need_the_largest_buffer(buffers):
    pairs = [OwnLoop(SmallNet(), images(1, batch)[0][0]) for batch in BATCHES]
    for turn in range(4):
        for batch, pair in zip(BATCHES, pairs, strict=True):
            pair.run(images(1, batch))
            if turn:
                pair.assert_served()
    assert buffers.sizes() == [max(pair.step.plan.buffer_bytes for pair in pairs)]
    assert buffers.most_bytes == buffers.sizes()[0]


def test_whole_steps_own_loops_and_inference_in_turn(buffers):
    whole = WholeStep(SmallNet(), MOMENTUM, images(1, 4)[0])
    student = OwnLoop(SmallNet(), images(1, 2)[0][0])
    model = SmallNet().eval()
    teacher = olla_fx.optimize(model, images(1, 6)[0][0], solver="none", fallback="raise")
    for _ in range(3):
        with torch.no_grad():
            x = images(1, 6)[0][0]
            assert_same(model(x), teacher(x), "answer")
        student.run(images(1, 2))
        whole.run(images(1, 4))
    steps = whole.step, student.step, teacher
    for step in steps:
        assert_served(step)
    assert buffers.sizes() == [max(step.plan.buffer_bytes for step in steps)] == [buffers.most_bytes]


def test_a_generator_and_a_discriminator(buffers):
    """The discriminator runs in turn with the generator, then within its forward and backward."""
    generator, discriminator = mlp(6, 16), nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    models = generator, discriminator
    eager = copy.deepcopy(models)
    z, real = torch.randn(4, 6), torch.randn(4, 16)
    planned = tuple(
        olla_fx.optimize(model, x, solver="none", fallback="raise")
        for model, x in zip(models, (z, real), strict=True)
    )

    def train(called, trained):
        make, judge = called
        optimizers = [sgd(model.parameters()) for model in trained]
        for optimizer in optimizers:
            optimizer.zero_grad()
        truth, lie = torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        loss = F.cross_entropy(judge(real), truth) + F.cross_entropy(judge(make(z).detach()), lie)
        loss.backward()
        optimizers[1].step()
        F.cross_entropy(judge(make(z)), truth).backward()
        optimizers[0].step()
        return loss.detach()

    for _ in range(5):
        for module in planned:
            module.poison()
        assert_same(train(eager, eager), train(planned, models), "loss")
    for ours, theirs in zip(models, eager, strict=True):
        assert_same_models(theirs, ours)
    assert_served(planned[0])
    assert planned[1].stats.cached_plans == 2
    assert planned[1].stats.stock_runs == 5
    # The discriminator runs in what the generator does not hold while it waits.
    (buffer_bytes,) = buffers.sizes()
    assert buffer_bytes < sum(module.plan.buffer_bytes for module in planned)


def test_inference_beside_gradients_that_were_left(buffers):
    """The gradients of the last step stay where they are while a teacher runs before they are cleared."""
    student = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    teacher = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)).eval()
    eager = copy.deepcopy(student)
    x = torch.randn(32, 64)
    planned = [olla_fx.optimize(model, x, solver="none", fallback="raise") for model in (student, teacher)]

    def train(model, called, ask):
        optimizer = sgd(model.parameters())
        with torch.no_grad():
            wanted = ask(x)
        before = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.zero_grad()
        loss = F.mse_loss(called(x), wanted)
        loss.backward()
        after = [parameter.grad.data_ptr() for parameter in model.parameters()]
        optimizer.step()
        return loss.detach(), before, after

    addresses = []
    for _ in range(6):
        theirs = train(eager, eager, teacher)[0]
        ours, *before_and_after = train(student, planned[0], planned[1])
        assert_same(theirs, ours, "loss")
        addresses.append(before_and_after)
    assert addresses[-1][0] == addresses[-2][1]
    assert_same_models(eager, student)
    for module in planned:
        assert_served(module)
    assert len(buffers.sizes()) == 1


def test_modules_that_wait_for_each_other_crosswise(buffers):
    """The first backward needs what the second module still holds: they are kept apart from then on."""
    models = [mlp(6, 16), mlp(6, 16)]
    eager = copy.deepcopy(models)
    x = torch.randn(64, 6)
    planned = [olla_fx.optimize(model, x, solver="none", fallback="raise") for model in models]
    for _ in range(6):
        for called, trained in ((eager, eager), (planned, models)):
            for model in trained:
                model.zero_grad()
            losses = [model(x).square().sum() for model in called]
            for loss in losses:
                loss.backward()
        for ours, theirs in zip(models, eager, strict=True):
            assert_same(
                [parameter.grad for parameter in theirs.parameters()],
                [parameter.grad for parameter in ours.parameters()],
                "gradients",
            )
    for module in planned:
        assert_served(module)
    assert buffers.sizes() == sorted(module.plan.buffer_bytes for module in planned)


def test_a_cell_that_is_called_many_times_before_backward(buffers):
    """A buffer of the whole plan's size for each call would cost more than eager needs."""
    pair = OwnLoop(nn.RNNCell(6, 6), (torch.zeros(4, 6), torch.zeros(4, 6)))
    x = torch.randn(30, 4, 6)

    def loop(called, _):
        hidden = torch.zeros(4, 6)
        for row in x:
            hidden = called(row, hidden)
        hidden.square().sum().backward()
        return hidden.detach()

    for turn in range(1, 4):
        pair.zero_grad()
        # Eager adds all uses of a weight in a row; see the limits in docs/design.md.
        pair.run_loop(loop, assert_close)
        assert pair.step.stats.stock_runs == 29 * turn
    assert buffers.sizes() == [buffers.most_bytes]


def test_one_buffer_serves_all_shapes(buffers):
    pair = WholeStep(SmallNet(), MOMENTUM, images(1, 2)[0])
    sizes = {}
    for batch in BATCHES * 2:
        pair.run(images(2, batch))
        sizes[batch] = pair.step.plan.buffer_bytes
        assert buffers.sizes() == [max(sizes.values())] == [buffers.most_bytes]
    made = buffers.made
    for batch in BATCHES * 5:
        pair.run(images(1, batch))
    assert buffers.made == made


def test_a_module_that_is_gone_gives_its_buffer_back(buffers):
    small = OwnLoop(mlp(), vectors(1)[0][0]).run(vectors(3))
    large = OwnLoop(SmallNet(), images(1)[0][0]).run(images(3))
    assert buffers.sizes() == [large.step.plan.buffer_bytes]
    del large
    gc.collect()
    assert buffers.sizes() == []
    small.run(vectors(1))
    small.assert_served()
    assert buffers.sizes() == [small.step.plan.buffer_bytes]


def test_a_graph_that_outlives_its_module_keeps_its_buffer(buffers):
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))
    pair.zero_grad()
    losses = pair.losses(images(1)[0])
    del pair.step
    gc.collect()
    assert len(buffers.sizes()) == 1
    for loss in losses:
        loss.backward()
    pair.compare_gradients()
    del losses, loss
    gc.collect()
    assert buffers.sizes() == []


def test_what_is_planned_anew_shares_the_buffer(buffers):
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0]).run(images(3))
    pair.replan()
    pair.run(images(3))
    copied = copy.deepcopy(pair.step)
    for batch in images(3):
        copied(*batch)
    assert_served(copied)
    assert buffers.sizes() == [pair.step.plan.buffer_bytes] == [buffers.most_bytes]


def test_two_modules_in_two_threads(buffers):
    """Each runs in a buffer of its own, which the other neither writes to nor frees."""
    pairs = [OwnLoop(SmallNet(0.0), images(1, batch)[0][0]) for batch in (2, 4)]
    batches = [images(12, batch) for batch in (2, 4)]
    expected = []
    for pair, own in zip(pairs, batches, strict=True):
        expected.append([torch.autograd.grad(pair.eager(x).sum(), pair.eager.conv.weight)[0] for x, _ in own])
    faults = []

    def work(index):
        try:
            pair = pairs[index]
            for (x, _), gradient in zip(batches[index], expected[index], strict=True):
                given = torch.autograd.grad(pair.step(x).sum(), pair.model.conv.weight)[0]
                assert_same(gradient, given, f"module {index}")
        except BaseException as error:
            faults.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults
    for pair in pairs:
        assert_served(pair.step)
        assert pair.step.stats.stock_runs == 0
    assert sum(buffers.sizes()) <= sum(pair.step.plan.buffer_bytes for pair in pairs)


def test_another_thread_leaves_gradients_where_they_are(buffers):
    """The thread that left them may be using them: the caller's optimizer, or what clips them."""
    student = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    teachers = [
        nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16)).eval() for width in (8, 900)
    ]
    x, y = torch.randn(32, 64), torch.randn(64, 16)
    planned = olla_fx.optimize(student, x, solver="none", fallback="raise")
    inferring = [olla_fx.optimize(model, y, solver="none", fallback="raise") for model in teachers]

    def infer():
        with torch.no_grad():
            for model, module in zip(teachers, inferring, strict=True):
                assert_same(model(y), module(y), "inference")

    for _ in range(4):
        student.zero_grad()
        planned(x).square().mean().backward()
        infer()
    student.zero_grad()
    planned(x).square().mean().backward()
    addresses = [parameter.grad.data_ptr() for parameter in student.parameters()]
    for _ in range(3):
        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()
    assert [parameter.grad.data_ptr() for parameter in student.parameters()] == addresses


@pytest.mark.parametrize("again", [False, True])
def test_a_module_behind_another(buffers, again):
    """The second one's gradients lie where the first one's backward runs: they go, nobody is disturbed."""
    models = [nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]) for _ in range(2)]
    eager = copy.deepcopy(models)
    x = torch.randn(64, 64)
    first, second = (olla_fx.optimize(model, x, solver="none", fallback="raise") for model in models)
    for turn in range(12):
        for called in (eager, (first, second)):
            for model in called:
                model.zero_grad()
            loss = called[1](called[0](x)).square().mean()
            if again:
                loss.backward(retain_graph=True)
            loss.backward()
        for theirs, ours in zip(eager, models, strict=True):
            pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
            assert_same(*zip(*((one.grad, other.grad) for one, other in pairs), strict=True), "gradients")
        if turn > 5:
            for module in (first, second):
                assert module.stats.counts.served > 0
                assert again or module.stats.counts.outside == 0
    for module in (first, second):
        assert module._plans.current.executor._recordings <= 1
    assert sum(buffers.sizes()) <= first.plan.buffer_bytes + second.plan.buffer_bytes


def test_what_is_kept_of_a_run_is_forgotten(buffers):
    pair = OwnLoop(mlp(), vectors(1)[0][0]).run(vectors(8))
    (segment,) = pool_of(torch.device("cpu"))._segments
    assert len(segment._left) <= 2
    pair.assert_served()


def test_gradients_of_the_step_before_that_the_caller_keeps(buffers):
    """They are in the way of the next run of the very plan that has left them, as another model's may be."""
    model, x = mlp(), vectors(1)[0][0]
    eager = copy.deepcopy(model)
    planned = olla_fx.optimize(model, x, solver="none", fallback="raise")
    kept = []
    for _ in range(8):
        for called, half in ((eager, eager), (planned, model)):
            half.zero_grad()
            called(x).square().sum().backward()
        theirs, ours = ([parameter.grad for parameter in half.parameters()] for half in (eager, model))
        assert_same(theirs, ours, "gradients")
        assert_same(theirs, kept or theirs, "gradients that were kept")
        kept = ours
        assert planned.stats.counts.outside == 0
    assert_served(planned)


def test_gradients_of_a_module_that_is_gone_do_not_stand_in_anothers_way(buffers):
    """A planned module is dropped while its model's gradients are in the buffer that another one needs."""

    def network():
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))

    def train(model, planned, steps):
        for _ in range(steps):
            model.zero_grad()
            F.cross_entropy(planned(x), y).backward()

    x, y = torch.randn(4, 3, 24, 24), torch.randint(10, (4,))
    gone, other = network(), network()
    planned_gone, planned_other = (olla_fx.optimize(model, x, solver="none") for model in (gone, other))
    train(other, planned_other, 3)
    train(gone, planned_gone, 4)
    train(other, planned_other, 3)
    train(gone, planned_gone, 1)
    expected = [parameter.grad.clone() for parameter in gone.parameters()]
    del planned_gone
    gc.collect()
    train(other, planned_other, 3)
    assert_served(planned_other)
    for gradient, parameter in zip(expected, gone.parameters(), strict=True):
        assert_same(gradient, parameter.grad, "gradient")
