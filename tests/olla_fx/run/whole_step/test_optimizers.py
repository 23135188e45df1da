"""Ten planned steps equal ten eager ones, bit for bit, for every optimizer."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim
from torch.optim import lr_scheduler

import olla_fx
from tests.olla_fx.harness import WholeStep, assert_served_if_settled
from tests.olla_fx.helpers import SmallNet, images, mlp, vectors

STEP_LR = partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12)  # cycles momentum or betas, too


COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=20)


REQUIRED = {
    "sgd": (optim.SGD, {"lr": 0.1}, STEP_LR),
    "sgd-nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True},
        ONE_CYCLE,
    ),
    "sgd-dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, ONE_CYCLE),
    "adam": (optim.Adam, {}, ONE_CYCLE),
    "adamw": (optim.AdamW, {}, ONE_CYCLE),
}


OTHERS = {
    "nadam": (optim.NAdam, {}, COSINE),
    "adamax": (optim.Adamax, {}, STEP_LR),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}, STEP_LR),
    "adadelta": (optim.Adadelta, {"lr": 1.0}, STEP_LR),
    "rmsprop": (optim.RMSprop, {}, STEP_LR),
    "rmsprop-centered": (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}, STEP_LR),
    "rprop": (optim.Rprop, {}, STEP_LR),
    "adam-amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}, ONE_CYCLE),
    "adamw-amsgrad": (optim.AdamW, {"amsgrad": True}, ONE_CYCLE),
    "sgd-maximize": (optim.SGD, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}, STEP_LR),
    "adam-maximize": (optim.Adam, {"maximize": True}, STEP_LR),
    "nadam-decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, STEP_LR),
}


@pytest.mark.parametrize("dropout", [0.1, 0.5])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("name", REQUIRED)
def test_ten_steps_equal_eager(name, foreach, dropout):
    make, options, scheduler = REQUIRED[name]
    pair = WholeStep(
        SmallNet(dropout), partial(make, foreach=foreach, **options), images(1)[0], scheduler=scheduler
    )
    pair.run(images(10))
    assert pair.step.stats.replans == 0


@pytest.mark.parametrize("name", OTHERS)
def test_ten_steps_equal_eager_with_other_optimizers(name):
    make, options, scheduler = OTHERS[name]
    pair = WholeStep(SmallNet(), partial(make, **options), images(1)[0], scheduler=scheduler)
    pair.run(images(10))
    assert pair.step.stats.replans == 0


@pytest.mark.parametrize(
    ("make", "options"),
    [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adam, {}), (optim.AdamW, {}), (optim.Adagrad, {})],
)
def test_fused_is_close_and_says_so_once(make, options):
    eager = mlp()
    planned = copy.deepcopy(eager)
    optimizers = [make(model.parameters(), fused=True, **options) for model in (eager, planned)]
    with pytest.warns(UserWarning, match=f"fused {make.__name__} is captured as its single-tensor") as warned:
        step = olla_fx.optimize(
            planned,
            vectors(1)[0],
            loss_fn=F.cross_entropy,
            optimizer=optimizers[1],
            solver="none",
            fallback="raise",
        )
    assert len([warning for warning in warned if "fused" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in vectors(5):
            step.poison()
            optimizers[0].zero_grad()
            loss = F.cross_entropy(eager(x), y)
            loss.backward()
            optimizers[0].step()
            torch.testing.assert_close(step(x, y), loss.detach())
            assert_served_if_settled(step, 1)
    for left, right in zip(eager.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["sgd-dampening", "adamw", "rmsprop-centered"])
def test_resumes_from_existing_optimizer_state(name):
    make, options, _ = {**REQUIRED, **OTHERS}[name]
    model = mlp()
    optimizer = make(model.parameters(), **options)
    for x, y in vectors(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    trained = copy.deepcopy(optimizer.state_dict())

    def resume(parameters):
        resumed = make(parameters, **options)
        resumed.load_state_dict(copy.deepcopy(trained))
        return resumed

    optimizer.zero_grad()
    WholeStep(model, resume, vectors(1)[0]).run(vectors(4))


def test_half_of_the_parameters_have_state():
    model = mlp()
    first = optim.Adam(model[0].parameters())
    F.cross_entropy(model(vectors(1)[0][0]), vectors(1)[0][1]).backward()
    first.step()
    state = copy.deepcopy(first.state_dict()["state"])

    def partly(parameters):
        optimizer = optim.Adam(parameters)
        for index, parameter in enumerate(optimizer.param_groups[0]["params"][:2]):
            optimizer.state[parameter] = {key: value.clone() for key, value in state[index].items()}
        return optimizer

    model.zero_grad()
    WholeStep(model, partly, vectors(1)[0]).run(vectors(3))


def test_parameter_groups_keep_their_own_numbers():
    def grouped(parameters):
        parameters = list(parameters)
        return optim.AdamW(
            [{"params": parameters[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": parameters[2:]}], lr=0.01
        )

    WholeStep(mlp(), grouped, vectors(1)[0], scheduler=STEP_LR).run(vectors(6))


def test_optimizer_over_some_of_the_parameters():
    pair = WholeStep(
        mlp(), lambda parameters: optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9), vectors(1)[0]
    )
    first = pair.model[0].weight.detach().clone()
    pair.run(vectors(3))
    assert torch.equal(first, pair.model[0].weight)


def test_negative_zero_gradients_stay_negative_zero():
    """The first momentum buffer is the gradient itself, sign of zero included."""

    class Signs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return (self.weight * x).sum()

    pair = WholeStep(
        Signs(),
        partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        (torch.zeros(4), torch.zeros(())),
        lambda output, target: output * target,
    )
    x = torch.tensor([-0.0, 0.0, -1.0, 1.0])
    pair.run([(x, torch.ones(())), (-x, torch.ones(())), (x, -torch.zeros(()))])
    assert torch.signbit(pair.optimizers[0].state[pair.eager.weight]["momentum_buffer"]).any()


def test_solvers_give_the_same_step():
    WholeStep(SmallNet(), partial(optim.AdamW), images(1)[0], solver="auto").run(images(4))
