"""What a step means: what it changes, what it looks up, when it plans again, and what it survives."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler

import olla_fx
from olla_fx import CaptureError, StepInputError, StepModeError, UnsupportedOptimizerError
from tests.olla_fx.helpers import (
    SmallNet,
    Twins,
    assert_same,
    assert_same_models,
    assert_served,
    bits,
    check_inference,
    images,
    mlp,
    sgd,
    vectors,
)

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


def picture(model, optimizer):
    """Everything that planning must leave alone, by value and by identity."""
    return {
        "values": {name: bits(each).clone() for name, each in model.state_dict().items()},
        "objects": {
            name: (id(each), each.requires_grad, each._version) for name, each in model.named_parameters()
        },
        "buffers": {name: (id(each), each._version) for name, each in model.named_buffers()},
        "grads": {
            name: each.grad if each.grad is None else id(each.grad) for name, each in model.named_parameters()
        },
        "modules": {name: dict(module.__dict__) for name, module in model.named_modules()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "groups": [(id(group), [id(each) for each in group["params"]]) for group in optimizer.param_groups],
        "group keys": [{**group, "params": None} for group in optimizer.param_groups],
        "state": {
            id(key): {name: id(each) for name, each in value.items()}
            for key, value in optimizer.state.items()
        },
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same_pictures(before, after):
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=0) if name in (
            "values", "random", "optimizer",
        ) else None  # fmt: skip
        if name not in ("values", "random", "optimizer"):
            assert before[name] == after[name], name


@pytest.mark.parametrize("shape", [(), (8, 8)], ids=["a class", "a class for each pixel"])
def test_losses_outlive_later_steps(shape):
    """The kernel of either loss asks for two blocks of 4 B, in another order; one is the caller's."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5))
    if not shape:
        model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    x, y = torch.randn(2, 3, 8, 8), torch.randint(5, (2, *shape))
    step = olla_fx.optimize(
        model, (x, y), loss_fn=F.cross_entropy, optimizer=MOMENTUM(model.parameters()), solver="none"
    )
    losses, values = [], []
    for calls in range(1, 4):
        losses.append(step(x, y))
        values.append(losses[-1].item())
        step.poison()
        assert [loss.item() for loss in losses] == values
        assert_served(step, calls, 1)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("what", ["optimize", "plan"])
@pytest.mark.parametrize("make", [MOMENTUM, optim.AdamW])
def test_planning_leaves_everything_alone(make, what, with_state):
    model = SmallNet()
    optimizer = make(model.parameters())
    x, y = images(1)[0]
    F.cross_entropy(model(x), y).backward()
    if with_state:
        optimizer.step()
    before = picture(model, optimizer)
    inputs = bits(x).clone()
    getattr(olla_fx, what)(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert_same_pictures(before, picture(model, optimizer))
    assert torch.equal(inputs, bits(x))


def test_the_first_call_is_a_real_step():
    twins = Twins(SmallNet(), optim.AdamW, images(1)[0])
    twins.compare()
    assert not twins.optimizers[1].state
    twins.run(images(1))
    assert twins.optimizers[1].state[twins.planned.head.weight]["step"] == 1


def test_gradients_are_as_before():
    twins = Twins(SmallNet(), MOMENTUM, images(1)[0])
    kept = torch.full_like(twins.planned.head.weight, 3.0)
    twins.planned.head.weight.grad = kept
    twins.run(images(3))
    assert twins.planned.head.weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 3.0))
    assert twins.planned.conv.weight.grad is None


def test_the_loss_is_the_callers():
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    x, y = vectors(1)[0]
    losses = [twins.step(x, y) for _ in range(4)]
    values = [float(loss) for loss in losses]
    twins.step.poison()
    twins.step(x, y)
    assert [float(loss) for loss in losses] == values
    assert len({loss.data_ptr() for loss in losses}) == 4
    assert not losses[0].requires_grad


# Late-bound numbers


@pytest.mark.parametrize(
    ("make", "options", "changes"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2},
         [{"lr": 0.01}, {"momentum": 0.5}, {"weight_decay": 0.3}, {"dampening": 0.1}, {"lr": 1}]),
        (optim.AdamW, {}, [{"lr": 0.1}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.5}, {"eps": 1e-3}]),
        (optim.RMSprop, {"momentum": 0.5}, [{"lr": 0.1}, {"alpha": 0.5}, {"momentum": 0.9}]),
        (optim.Rprop, {}, [{"etas": (0.4, 1.3)}, {"step_sizes": (1e-4, 1.0)}]),
    ],
)  # fmt: skip
def test_numbers_take_effect_in_the_next_step_without_a_new_plan(make, options, changes):
    twins = Twins(mlp(), partial(make, **options), vectors(1)[0])
    twins.run(vectors(2))
    for change in changes:
        for optimizer in twins.optimizers:
            optimizer.param_groups[0].update(change)
        twins.run(vectors(2))
    assert twins.step.replans == 0


@pytest.mark.parametrize(
    ("make", "options", "change"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
        (optim.SGD, {"lr": 0.1}, {"momentum": 0.9}),
        (optim.SGD, {"lr": 0.1}, {"weight_decay": 0.1}),
        (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0}),
        (optim.SGD, {"lr": 0.1}, {"lr": 0.0}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"nesterov": True}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"dampening": 0.5}),
        (optim.SGD, {"lr": 0.1}, {"maximize": True}),
        (optim.AdamW, {}, {"betas": (0.0, 0.9)}),
        (optim.AdamW, {}, {"weight_decay": 0.0}),
    ],
)
def test_numbers_that_become_or_leave_zero_plan_again(make, options, change):
    twins = Twins(mlp(), partial(make, **options), vectors(1)[0])
    twins.run(vectors(3))
    before = [dict(group) for group in twins.optimizers[0].param_groups]
    for optimizer in twins.optimizers:
        optimizer.param_groups[0].update(change)
    replanned(twins, 1)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0].update({key: before[0][key] for key in change})
    if change == {"momentum": 0.9}:
        replanned(twins, 2)  # the first plan knows no momentum buffer, which stays
    else:
        twins.run(vectors(3))
        assert twins.step.replans == 1  # the first plan fits again


def test_a_number_that_becomes_a_tensor_is_no_longer_read_as_a_number():
    """Eager's arithmetic with a tensor as learning rate is another one, to the last bit."""
    twins = Twins(mlp(), optim.AdamW, vectors(1)[0]).run(vectors(2))
    twins.optimizers[1].param_groups[0]["lr"] = torch.tensor(1e-3)
    with pytest.raises(UnsupportedOptimizerError, match="lr is a tensor"):
        twins.step(*vectors(1)[0])
    twins.optimizers[1].param_groups[0]["lr"] = 1e-3
    twins.run(vectors(2))


def replanned(twins, times):
    """Three more steps, the first of which plans again, and so is the first of a new plan."""
    twins.calls = 0
    twins.run(vectors(3))
    assert twins.step.replans == times


def test_a_learning_rate_that_decays_to_zero():
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=4)
    twins = Twins(mlp(), optim.AdamW, vectors(1)[0], scheduler=cosine)
    for x, y in vectors(8):
        expected = twins.train_eager((x, y))
        twins.step.poison()
        assert_same(expected, twins.step(x, y), "loss")
        for scheduler in twins.schedulers:
            scheduler.step()
    twins.compare()
    assert twins.step.replans == 1


def test_schedulers_do_not_warn():
    model = mlp()
    optimizer = MOMENTUM(model.parameters())
    step = olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in vectors(3):
            step(x, y)
            scheduler.step()


# Lookups


def both(twins, change):
    for model, optimizer in zip((twins.eager, twins.planned), twins.optimizers, strict=True):
        change(model, optimizer)


def test_load_state_dict():
    twins = Twins(SmallNet(), MOMENTUM, images(1)[0])
    other = {name: value + 1 for name, value in SmallNet().state_dict().items()}
    twins.run(images(2))
    both(twins, lambda model, _: model.load_state_dict(other))
    twins.run(images(2))
    assert twins.step.replans == 0


def test_load_state_dict_by_assignment():
    """In eager the optimizer must be told; the step finds the model's new parameters itself."""
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    twins.run(vectors(2))
    values = [{name: value * 2 for name, value in twins.eager.state_dict().items()} for _ in range(2)]
    old = list(twins.eager.parameters())
    twins.eager.load_state_dict(values[0], assign=True)
    twins.planned.load_state_dict(values[1], assign=True)
    for before, after in zip(old, twins.eager.parameters(), strict=True):
        twins.optimizers[0].state[after] = twins.optimizers[0].state.pop(before)
    twins.optimizers[0].param_groups[0]["params"] = list(twins.eager.parameters())
    twins.run(vectors(3))
    assert twins.step.replans == 0
    assert twins.planned[0].weight.data_ptr() == values[1]["0.weight"].data_ptr()


def test_load_state_dict_by_assignment_keeps_ties():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    step = olla_fx.optimize(
        model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), solver="none"
    )
    x, y = vectors(1)[0]
    step(x, y)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    eager = copy.deepcopy(model)
    optimizer = sgd(eager.parameters())
    loss = F.cross_entropy(eager(x), y)
    loss.backward()
    optimizer.step()
    assert_same(loss.detach(), step(x, y), "loss")
    assert_same(eager[0].weight, model[0].weight, "weight")


@pytest.mark.parametrize("through", ["model", "step"])
def test_to_another_type_plans_again(through):
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    twins.run(vectors(2))
    twins.eager.to(torch.float64)
    (twins.planned if through == "model" else twins.step).to(torch.float64)
    for optimizer in twins.optimizers:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()
    twins.calls = 0
    twins.run([(x.double(), y) for x, y in vectors(3)])
    assert twins.step.replans == 1
    assert twins.planned[0].weight.dtype == torch.float64


@pytest.mark.parametrize("make", [MOMENTUM, optim.AdamW])
def test_optimizer_load_state_dict(make):
    twins = Twins(mlp(), make, vectors(1)[0])
    twins.run(vectors(2))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
    twins.run(vectors(3))
    for optimizer, state in zip(twins.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    twins.run(vectors(3))
    assert twins.step.replans == 0


def test_optimizer_state_that_is_emptied_is_made_again():
    twins = Twins(mlp(), partial(MOMENTUM, dampening=0.5), vectors(1)[0])
    twins.run(vectors(2))
    both(twins, lambda _, optimizer: optimizer.state.clear())
    twins.run(vectors(3))
    assert twins.step.replans == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.conv.requires_grad_(False),
        lambda model, _: model.norm.eval(),
        lambda model, _: model.drop.eval(),
        lambda model, _: model.frozen.requires_grad_(True),
        lambda _, optimizer: optimizer.param_groups[0]["params"].pop(2),
    ],
    ids=["freeze", "norm eval", "dropout eval", "unfreeze", "fewer parameters"],
)
def test_changes_of_the_model_plan_again(change):
    twins = Twins(SmallNet(), MOMENTUM, images(1)[0])
    twins.run(images(2))
    both(twins, change)
    twins.calls = 0
    twins.run(images(3))
    assert twins.step.replans == 1


def test_a_replaced_layer_plans_again():
    """The optimizer must be told, as in eager; one that still holds the old layer is refused."""
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    twins.run(vectors(2))
    both(twins, lambda model, _: model.__setitem__(2, copy.deepcopy(model[2])))
    both(twins, lambda model, optimizer: optimizer.param_groups[0].update(params=list(model.parameters())))
    twins.calls = 0
    twins.run(vectors(3))
    assert twins.step.replans == 1


def test_adding_a_parameter_group_plans_again():
    twins = Twins(mlp(), lambda parameters: MOMENTUM(list(parameters)[2:]), vectors(1)[0])
    twins.run(vectors(2))
    both(
        twins,
        lambda model, optimizer: optimizer.add_param_group(
            {"params": list(model[0].parameters()), "lr": 0.5}
        ),
    )
    twins.calls = 0
    twins.run(vectors(3))
    assert twins.step.replans == 1


def test_shares_parameters_and_state_dict_with_the_model():
    twins = Twins(SmallNet(), MOMENTUM, images(1)[0])
    step, model = twins.step, twins.planned
    assert isinstance(step, nn.Module)
    assert list(step.state_dict()) == list(model.state_dict())
    assert all(one is other for one, other in zip(step.parameters(), model.parameters(), strict=True))
    assert dict(step.named_buffers()).keys() == dict(model.named_buffers()).keys()
    step.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    assert not model.head.weight.any()


def test_train_and_eval_reach_the_model():
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    twins.step.eval()
    assert not twins.planned.training
    with pytest.raises(StepModeError, match=r"model\.train\(\)"):
        twins.step(*vectors(1)[0])
    twins.step.train()
    twins.run(vectors(2))


def test_inference_follows_the_models_weights():
    model = mlp().eval()
    step = check_inference(model, [(x,) for x, _ in vectors(3)], 1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    x = vectors(1)[0][0]
    with torch.no_grad():
        assert_same(model(x), step(x), "answer")
    assert step.replans == 0


def test_inference_refuses_training_mode():
    model = mlp().eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none")
    model.train()
    with pytest.raises(StepModeError, match=r"model\.eval\(\)"):
        step(torch.ones(4, 6))


# Hooks


def test_optimizer_post_hooks_run():
    model = mlp()
    optimizer = sgd(model.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments[0]))
    step = olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert not seen
    for x, y in vectors(3):
        step(x, y)
    assert seen == [optimizer] * 3


def test_optimizer_pre_hooks_are_refused():
    model = mlp()
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizerError, match="pre-hooks"):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer)


# Ambient state


def test_a_step_under_ambient_autocast_equals_eager():
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    kinds = [True] * 9 + [False] * 3 + [True] * 9
    for autocast, (x, y) in zip(kinds, vectors(21), strict=True):
        twins.step.poison()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            twins.optimizers[0].zero_grad()
            loss = F.cross_entropy(twins.eager(x), y)
            given = twins.step(x, y)
        loss.backward()
        twins.optimizers[0].step()
        assert_same(loss.detach(), given, "loss")
    twins.compare()
    assert_served(twins.step, 9, 1)


def test_an_input_in_a_parameters_storage_is_refused():
    """Eager reads the weight as input in all of backward, and only then updates it; no plan knows that."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    twins = Twins(model, sgd, (torch.ones(6, 6), torch.ones(6, 6)), F.mse_loss)
    before = copy.deepcopy(model)
    for _ in range(2):
        with pytest.raises(StepInputError, match=r"input 0 shares its storage with parameter 2\.weight"):
            twins.step(model[2].weight.detach(), torch.ones(6, 6))
        assert_same_models(before, model)
    twins.run([(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(3)])


def test_an_input_that_requires_a_gradient_is_refused():
    twins = Twins(mlp(), sgd, vectors(1)[0])
    x, y = vectors(1)[0]
    with pytest.raises(StepInputError, match="input 0 requires a gradient"):
        twins.step(x.requires_grad_(), y)


def test_inputs_in_one_storage():
    """Both are read only; where the model writes one of them, it is refused."""

    class Sum(nn.Module):
        def __init__(self, writes):
            super().__init__()
            self.body, self.writes = mlp(), writes

        def forward(self, x, y):
            return self.body(x + (y.mul_(2) if self.writes else y))

    both_ways = torch.randn(5, 6)
    for writes in (False, True):
        model = Sum(writes)
        example = (torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, dtype=torch.long))
        step = olla_fx.optimize(model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))
        overlapping = (both_ways[:4], both_ways[1:], example[2])
        if writes:
            with pytest.raises(StepInputError, match="input 0 shares its storage with input 1"):
                step(*overlapping)
        else:
            step(*overlapping)


def test_planning_and_calling_under_no_grad():
    with torch.no_grad():
        twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    for x, y in vectors(3):
        expected = twins.train_eager((x, y))
        with torch.no_grad():
            assert_same(expected, twins.step(x, y), "loss")
    twins.compare()


# Faults and threads


def test_an_exception_in_a_step_leaves_it_usable():
    """A class out of range stops the step in its loss, before any update."""
    twins = Twins(mlp(), sgd, vectors(1)[0])
    bad = torch.tensor([0, 1, 99, 0])
    for calls, (x, y) in enumerate(vectors(20), 1):
        with pytest.raises(IndexError, match="out of bounds"):
            twins.step(x, bad)
        twins.train((x, y))
        twins.compare()
        assert calls == 1 or twins.step.binding == "buffer"
    with pytest.raises(IndexError):
        twins.step(x, bad)
    twins.run(vectors(3))


def test_two_steps_alternate():
    one = Twins(SmallNet(), optim.AdamW, images(1)[0])
    other = Twins(mlp(), MOMENTUM, vectors(1)[0])
    answer = check_inference(mlp().eval(), [(x,) for x, _ in vectors(2)], 1)
    for batch, vector in zip(images(20), vectors(20), strict=True):
        one.train(batch)
        other.train(vector)
        answer.poison()
        answer(vector[0])
    one.compare()
    other.compare()


def test_training_and_inference_of_one_model_alternate():
    model = SmallNet(0.0)
    twins = Twins(model, MOMENTUM, images(1)[0])
    fast = olla_fx.optimize(model.eval(), images(1)[0][0], solver="none")
    for batch in images(20):
        model.train()
        twins.train(batch)
        model.eval()
        fast.poison()
        with torch.no_grad():
            assert_same(model(batch[0]), fast(batch[0]), "answer")


def test_calls_from_several_threads_are_taken_one_by_one():
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none")
    inputs = [torch.randn(4, 6) for _ in range(40)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    given = {}
    faults = []

    def work(start):
        try:
            for index in range(start, len(inputs), 4):
                given[index] = step(inputs[index])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for index, answer in enumerate(expected):
        assert_same(answer, given[index], f"answer {index}")
    assert_served(step, 40, 1)


def test_training_in_another_thread_than_planning():
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    faults = []

    def work(batches):
        try:
            twins.run(batches)
        except BaseException as error:
            faults.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work, args=(vectors(2),))
        thread.start()
        thread.join()
    twins.run(vectors(2))
    assert not faults


class Attention(nn.Module):
    """bf16 attention, whose backward allocates on worker threads, in another order every time."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96, dtype=torch.bfloat16)

    def forward(self, x):
        query, key, value = self.project(x).view(2, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_attention_backward_replayed_two_hundred_times_with_two_threads():
    torch.set_num_threads(2)
    x, target = (
        torch.randn(2, 128, 32, dtype=torch.bfloat16),
        torch.randn(2, 2, 128, 16, dtype=torch.bfloat16),
    )
    twins = Twins(Attention(), partial(optim.SGD, lr=0.5), (x, target), F.mse_loss)
    start = copy.deepcopy(twins.eager.state_dict())
    twins.train((x, target))
    expected = copy.deepcopy(twins.eager.state_dict())
    workers = 0
    for _ in range(200):
        twins.planned.load_state_dict(start)
        twins.step.poison()
        twins.step(x, target)
        workers = max(workers, twins.step.counts.requests_on_worker_threads)
        assert_served(twins.step, 2, 1)
        for name, value in twins.planned.state_dict().items():
            assert_same(expected[name], value, name)
    assert workers > 0


# Calls that do not fit


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda x, y: (torch.randn(4, 7), y), CaptureError, "rejects the example input"),
        (lambda x, y: (x.double(), y), CaptureError, "float32 and float64"),
        (lambda x, y: (x, y.int()), CaptureError, "int32"),
        (lambda x, y: (x.to("meta"), y), StepInputError, "meta device"),
        (lambda x, y: (x,), CaptureError, "missing 1 required positional argument"),
        (lambda x, y: (x, y, y), CaptureError, "takes 2 positional arguments"),
        (lambda x, y: (x, {"target": y}), CaptureError, "must be Tensor, not dict"),
        (lambda x, y: (x, 3), CaptureError, "must be Tensor, not int"),
        (lambda x, y: (x, bytearray(3)), StepInputError, "holds a bytearray"),
    ],
    ids=["shape", "dtype", "target dtype", "device", "few", "many", "structure", "number", "bytes"],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_the_model_rejects(call, kind, said):
    twins = Twins(mlp(), MOMENTUM, vectors(1)[0])
    twins.run(vectors(2))
    before = copy.deepcopy(twins.planned)
    with pytest.raises(kind, match=said):
        twins.step(*call(*vectors(1)[0]))
    assert_same_models(before, twins.planned)
    twins.run(vectors(2))
    assert twins.step.replans == 0


def test_lazily_conjugated_inputs():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, z):
            return self.body(z.real + z.imag)

    z, y = torch.randn(4, 6, dtype=torch.cfloat), torch.zeros(4, dtype=torch.long)
    twins = Twins(Parts(), sgd, (z, y))
    for batch in ((z.conj(), y), (z, y), (z.conj(), y)):
        assert_same(twins.train_eager(batch), twins.step(*batch), "loss")
    twins.compare()
    assert_served(twins.step, 3, 1)
