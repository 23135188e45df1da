"""What runs in eager does what eager does: to gradients, schedules, precision and errors."""

import pytest
import torch
from torch import nn

import olla_fx
from tests.olla_fx.comparisons import assert_same, random_states
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import ADAMW, SmallNet, images
from tests.olla_fx.run.fallback.falling import ONE_PLAN_A_SIZE, FallingStep, sizes_in_turn, whole_step
from tests.olla_fx.run.whole_step.clipped import ClippedStep


def test_a_wrong_input_raises_the_models_own_error(make):
    pair = make()
    with pytest.raises(RuntimeError, match="expected input"):
        pair.step(torch.randn(2, 7, 8, 8), *images(1)[0][1:] * (not isinstance(pair, OwnLoop)))


def test_gradients_of_a_whole_step_stay_as_they_are():
    """The planned step neither reads nor writes ``.grad``, and so does the one in eager."""
    pair = whole_step()
    kept = {name: torch.full_like(parameter, 3.0) for name, parameter in pair.model.named_parameters()}
    for name, parameter in pair.model.named_parameters():
        parameter.grad = kept[name]
    for batch in sizes_in_turn(3, 2, 4, 6):
        pair.train(batch)
        for name, parameter in pair.model.named_parameters():
            assert parameter.grad is kept[name]
            assert bool((kept[name] == 3).all())
    pair.compare()
    assert pair.step.stats.eager_runs == 2


class ClippedFallingStep(ClippedStep, FallingStep):
    pass


@pytest.mark.parametrize("options", [{}, {"return_outputs": True}])
def test_accumulated_and_clipped(options):
    pair = ClippedFallingStep(
        nn.Sequential(SmallNet(), nn.Dropout(0.2)),
        ADAMW,
        images(1, batch=4)[0],
        parts=2,
        norm=0.1,
        value=0.05,
        fallback="eager",
        **options,
    )
    pair.run(sizes_in_turn(6, 4, 6, 8))
    assert pair.step.stats.eager_runs >= 2


def test_a_schedule_goes_on():
    """Schedulers and step hooks see a step in eager as they see a planned one."""
    pair = FallingStep(
        SmallNet(),
        ADAMW,
        images(1)[0],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        **ONE_PLAN_A_SIZE,
    )
    stepped = []
    pair.optimizers[1].register_step_post_hook(lambda *_: stepped.append(None))
    pair.run(sizes_in_turn(5, 2, 3, 4))
    assert len(stepped) == 5
    assert pair.step.stats.eager_runs == 2


def test_in_autocast():
    pair = OwnLoop(
        SmallNet(),
        images(1)[0][0],
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        fallback="eager",
    )
    pair.run(sizes_in_turn(6, 2, 4))
    step = whole_step()
    states = []
    for batch in sizes_in_turn(3, 2, 4, 6):
        for train in (step.train_eager, lambda same: step.step(*same)):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                states.append((train(batch), random_states()))
        assert_same(*states[-2:], "answers")
    step.compare()


def test_an_error_in_eager_changes_nothing():
    pair = whole_step()
    x, y = images(1, batch=3)[0]
    before = {name: value.clone() for name, value in pair.model.state_dict().items()}
    with pytest.raises(IndexError):
        pair.step(x, y + 99)
    assert all(parameter.grad is None for parameter in pair.model.parameters())
    for name, parameter in pair.model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not pair.optimizers[1].state


def test_an_input_that_wants_a_gradient():
    pair = whole_step()
    x, y = images(1, batch=3)[0]
    with pytest.raises(olla_fx.StepInputError, match="gradient"):
        pair.step(x.requires_grad_(), y)
