"""An optimizer's numbers are read at every step, as in eager."""

from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from olla_fx import UnsupportedOptimizerError
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import MOMENTUM, mlp, vectors


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
    pair = WholeStep(mlp(), partial(make, **options), vectors(1)[0])
    pair.run(vectors(2))
    for change in changes:
        for optimizer in pair.optimizers:
            optimizer.param_groups[0].update(change)
        pair.run(vectors(2))
    assert pair.step.stats.replans == 0


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
def test_numbers_that_become_zero_or_nonzero_plan_again(make, options, change):
    pair = WholeStep(mlp(), partial(make, **options), vectors(1)[0])
    pair.run(vectors(3))
    before = [dict(group) for group in pair.optimizers[0].param_groups]
    for optimizer in pair.optimizers:
        optimizer.param_groups[0].update(change)
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1
    for optimizer in pair.optimizers:
        optimizer.param_groups[0].update({key: before[0][key] for key in change})
    pair.run(vectors(3))
    # The first plan fits again, unless a momentum buffer stays that it does not know.
    assert pair.step.stats.replans == (2 if change == {"momentum": 0.9} else 1)


def test_a_number_that_becomes_a_tensor_is_no_longer_read_as_a_number():
    """Eager's arithmetic with a tensor as learning rate is another one, to the last bit."""
    pair = WholeStep(mlp(), optim.AdamW, vectors(1)[0]).run(vectors(2))
    pair.optimizers[1].param_groups[0]["lr"] = torch.tensor(1e-3)
    with pytest.raises(UnsupportedOptimizerError, match="lr is a tensor"):
        pair.step(*vectors(1)[0])
    pair.optimizers[1].param_groups[0]["lr"] = 1e-3
    pair.run(vectors(2))


def test_a_learning_rate_that_decays_to_zero():
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=4)
    pair = WholeStep(mlp(), optim.AdamW, vectors(1)[0], scheduler=cosine).run(vectors(8))
    assert pair.step.stats.replans == 1


def test_schedulers_do_not_warn():
    """The harness turns their warnings into errors."""
    WholeStep(mlp(), MOMENTUM, vectors(1)[0], scheduler=partial(lr_scheduler.StepLR, step_size=1)).run(
        vectors(3)
    )
