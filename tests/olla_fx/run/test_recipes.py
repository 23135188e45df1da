"""What training loops do around backward: micro-batches, clipping, copies, checkpoints, averages."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.helpers import (
    SmallNet,
    Twins,
    assert_same,
    assert_same_models,
    assert_served,
    images,
    mlp,
    sgd,
    vectors,
)

ADAMW = partial(optim.AdamW, lr=0.05)
MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


class Recipes(Twins):
    """Twins whose eager half does by hand what the planned one is asked for."""

    def __init__(self, *arguments, parts=1, norm=None, value=None, **options):
        self.parts, self.norm, self.value = parts, norm, value
        super().__init__(
            *arguments, micro_batches=parts, clip_grad_norm=norm, clip_grad_value=value, **options
        )

    def train_eager(self, batch):
        self.optimizers[0].zero_grad()
        losses, answers = [], []
        for x, y in zip(*(each.chunk(self.parts) for each in batch), strict=True):
            answer = self.eager(x)
            loss = self.loss_fn(answer, y)
            loss = loss / self.parts if self.parts > 1 else loss
            loss.backward()
            losses.append(loss.detach())
            answers.append(answer.detach())
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.eager.parameters(), self.norm)
        if self.value is not None:
            nn.utils.clip_grad_value_(self.eager.parameters(), self.value)
        self.optimizers[0].step()
        loss = sum(losses[1:], losses[0])
        return (loss, torch.cat(answers)) if self.return_outputs else loss


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
@pytest.mark.parametrize(
    "recipe",
    [
        {"parts": 3},
        {"norm": 0.05},
        {"value": 0.01},
        {"parts": 2, "norm": 0.05, "value": 0.02},
        {"parts": 6, "return_outputs": True, "outputs": 2},
        {"norm": 0.05, "scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)},
    ],
    ids=["micro-batches", "norm", "value", "all", "outputs", "schedule"],
)
def test_recipes(make, recipe):
    twins = Recipes(SmallNet(), make, images(1, batch=6)[0], **recipe)
    twins.run(images(20, batch=6))
    assert twins.step.replans == 0


def test_micro_batches_need_less_memory():
    peaks = []
    for parts in (1, 4):
        model = SmallNet()
        plan = olla_fx.plan(
            model,
            images(1, batch=8, size=24)[0],
            loss_fn=F.cross_entropy,
            optimizer=sgd(model.parameters()),
            micro_batches=parts,
            solver="none",
        )
        peaks.append(plan.peak_bytes)
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batches": 3}, "batch of 4 cannot be cut into 3"),
        ({"micro_batches": 0}, "at least 1, not 0"),
        ({"micro_batches": True}, "at least 1, not True"),
        ({"clip_grad_norm": -1}, "above 0 or None, not -1"),
        ({"clip_grad_value": "1"}, "above 0 or None, not '1'"),
    ],
)
def test_recipes_without_a_meaning(options, said):
    model = mlp()
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(CaptureError, match=said):
            function(
                model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), **options
            )


def test_recipes_belong_to_whole_steps():
    with pytest.raises(CaptureError, match="parts of a whole training step"):
        olla_fx.optimize(mlp(), vectors(1)[0][0], clip_grad_norm=1.0)


def copied(step):
    return copy.deepcopy(step)


def pickled(step):
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_trains_on_by_itself(remake):
    twins = Twins(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    other = remake(twins.step)
    before = copy.deepcopy(twins.planned)
    reference = copy.deepcopy((twins.eager, twins.optimizers[0]))
    for index, (x, y) in enumerate(images(20)):
        other.poison()
        torch.manual_seed(index)
        reference[1].zero_grad()
        loss = F.cross_entropy(reference[0](x), y)
        loss.backward()
        reference[1].step()
        torch.manual_seed(index)
        assert_same(loss.detach(), other(x, y), "loss of the copy")
    assert_same_models(before, twins.planned)
    assert other.binding == "buffer"
    assert other.counts.served > 0
    assert other.counts.outside == 0
    assert_same(dict(reference[0].state_dict()), dict(other.state_dict()), "weights of the copy")
    twins.run(images(2))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_of_an_own_loop_and_of_an_inference(remake):
    x, y = vectors(1)[0]
    model = mlp()
    module = olla_fx.optimize(model, x)
    F.cross_entropy(module(x), y).backward()
    other = remake(module)
    eager = copy.deepcopy(model)
    optimizers = [sgd(each.parameters()) for each in (eager, other)]
    for batch, target in vectors(20):
        other.poison()
        for each, optimizer in zip((eager, other), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(batch), target).backward()
            optimizer.step()
    assert_same(dict(eager.state_dict()), dict(other.state_dict()), "weights of the copy")
    assert other.binding == "buffer"
    assert other.counts.served > 0
    assert other.counts.outside == 0
    assert other.state_dict().keys() == module.state_dict().keys()
    mine, theirs = ([each.data_ptr() for each in one.parameters()] for one in (module, other))
    assert not set(mine) & set(theirs)
    fast = olla_fx.optimize(mlp().eval(), x)
    assert_same(fast(x), remake(fast)(x), "inference")


def test_a_planned_module_within_a_copied_model():
    inner = olla_fx.optimize(mlp(), vectors(1)[0][0])
    outer = copy.deepcopy(nn.Sequential(inner, nn.Linear(3, 3)))
    x, y = vectors(1)[0]
    F.cross_entropy(outer(x), y).backward()
    assert all(each.grad is not None for each in outer.parameters())
    assert inner._model[0].weight.grad is None


def test_checkpoints_in_the_middle_of_training(tmp_path):
    twins = Twins(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    states = {"model": twins.step.state_dict(), "optimizer": twins.optimizers[1].state_dict()}
    torch.save(states, tmp_path / "c")
    twins.run(images(2))
    saved = torch.load(tmp_path / "c")
    later = Twins(SmallNet(), ADAMW, images(1)[0])
    for model, optimizer in zip((later.eager, later.step), later.optimizers, strict=True):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    later.run(images(20))


def test_an_average_of_the_weights():
    twins = Twins(SmallNet(), ADAMW, images(1)[0])
    averages = [
        optim.swa_utils.AveragedModel(each, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for each in (twins.eager, twins.planned)
    ]
    for batch in images(20):
        twins.train(batch)
        for average, model in zip(averages, (twins.eager, twins.planned), strict=True):
            average.update_parameters(model)
    assert_same_models(*averages)


def test_layers_are_frozen_and_unfrozen_between_epochs():
    twins = Twins(SmallNet(), MOMENTUM, images(1)[0]).run(images(8))
    for wanted in (False, True):
        for model in (twins.eager, twins.planned):
            model.conv.requires_grad_(wanted)
            model.conv.zero_grad()
        if not wanted:
            twins.calls = 0
        twins.run(images(8))
    assert twins.step.replans == 1  # unfrozen, the first plan fits again


def test_channels_last_and_mixed_types():
    class Mixed(SmallNet):
        def forward(self, x):
            return super().forward(x).to(torch.bfloat16).float()

    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in images(20)]
    model = Mixed().to(memory_format=torch.channels_last)
    Twins(model, MOMENTUM, batches[0]).run(batches)


def test_the_last_batch_of_an_epoch_is_smaller():
    twins = Twins(SmallNet(0.0), MOMENTUM, images(1, batch=4)[0])
    for _ in range(4):
        for batch in (*images(4, batch=4), *images(1, batch=3)):
            _train(twins, batch)
    twins.compare()
    assert len(twins.step._plans) == 2
    assert twins.step.replans == 0
    assert_served(twins.step, 20, 1)


def _train(twins, batch):
    """One step of both; requests are counted by the caller, as every shape records a first call."""
    expected = twins.train_eager(batch)
    twins.step.poison()
    assert_same(expected, twins.step(*batch), "loss")


def test_one_buffer_serves_all_shapes():
    twins = Twins(SmallNet(0.0), MOMENTUM, images(1, batch=4)[0])
    sizes = {}
    for batch in (4, 2, 6, 4, 2, 6):
        for each in images(4, batch=batch):
            _train(twins, each)
        sizes[batch] = twins.step.plan.buffer_bytes
        assert twins.step._buffer._buffer.buffer_bytes == max(sizes.values())
    twins.compare()


def test_more_plans_than_the_limit():
    twins = Twins(SmallNet(0.0), MOMENTUM, images(1, batch=2)[0], most_plans=2)
    for batch in (2, 3, 4, 3, 2, 4):
        for each in images(4, batch=batch):
            _train(twins, each)
        assert len(twins.step._plans) <= 2
        assert_served(twins.step, 4, 1)
    twins.compare()


def test_the_plan_that_was_not_used_for_longest_goes_first(caplog):
    model = mlp()
    step = olla_fx.optimize(
        model,
        vectors(1, batch=2)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        most_plans=2,
        solver="none",
    )
    planned = []
    with caplog.at_level("INFO", logger="olla_fx.run.module"):
        for batch in (3, 2, 4, 2, 3):
            caplog.clear()
            step(*vectors(1, batch=batch)[0])
            planned.append(any("planning for a new kind" in each.message for each in caplog.records))
    assert planned == [True, False, True, False, True]


@pytest.mark.parametrize("recipe", [{"parts": 2}, {"norm": 0.05}])
def test_recipes_with_gradients_that_are_one_tensor(recipe):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
            self.c = nn.Parameter(torch.randn(()))

        def forward(self, x):
            return F.linear(x, self.a + self.b) + self.c

    Recipes(Shared(), MOMENTUM, vectors(1)[0], **recipe).run(vectors(5))


def test_a_planned_module_within_a_model_that_is_planned():
    inner = olla_fx.optimize(mlp(), torch.ones(4, 6))
    outer = nn.Sequential(inner, nn.Linear(3, 3))
    reference = copy.deepcopy(nn.Sequential(inner._model, outer[1]))
    x, y = vectors(1)[0]
    planned = olla_fx.optimize(outer, x, solver="none")
    for _ in range(3):
        for module in (reference, planned):
            F.cross_entropy(module(x), y).backward()
        for one, other in zip(reference.parameters(), outer.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")


def heard(module, inputs, output):
    module.heard = [*getattr(module, "heard", []), float(output.detach().sum())]


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_keeps_hooks_and_attributes_of_the_planned_module(remake):
    x = vectors(1)[0][0]
    module = olla_fx.optimize(mlp(), x)
    module.register_forward_hook(heard)
    module.note = {"epoch": 3}
    other = remake(module)
    assert other.note == module.note
    assert other.note is not module.note
    for _ in range(3):
        answer = other(x)
    assert other.heard == [float(answer.detach().sum())] * 3
    assert not hasattr(module, "heard")
    assert_same(module(x).detach(), answer.detach(), "answer")


def test_a_loss_without_a_name_cannot_be_pickled():
    model, (x, y) = mlp(), vectors(1)[0]
    step = olla_fx.optimize(
        model, (x, y), loss_fn=lambda *each: F.cross_entropy(*each), optimizer=sgd(model.parameters())
    )
    with pytest.raises(olla_fx.OllaError, match=r"lambda> cannot be pickled.*with def"):
        pickle.dumps(step)


def test_one_backward_serves_all_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.one(x), self.other(x)

    eager = Two()
    module = olla_fx.optimize(copy.deepcopy(eager), torch.ones(4, 6))
    for _ in range(2):
        one, other = module(torch.ones(4, 6))
        one.sum().backward()
        with pytest.raises(olla_fx.OllaError, match="All outputs of a forward share one backward"):
            other.sum().backward()
        assert not module.is_busy
    for planned in (eager, module):
        planned.zero_grad()
        one, other = planned(torch.ones(4, 6))
        one.sum().backward(retain_graph=True)
        other.sum().backward()
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert_same(theirs.grad, mine.grad, "gradient")
