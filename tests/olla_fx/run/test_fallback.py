"""Calls that have no plan run in eager, with eager's results, and are planned when they come again."""

import collections
import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError
from olla_fx.models import import_torchvision
from olla_fx.run.new_kinds import CALLS_BEFORE_WARNING
from tests.olla_fx.comparisons import assert_close, assert_same, random_states
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW, SmallNet, images, mlp, sgd, skip_without, vectors
from tests.olla_fx.run.whole_step.clipped import ClippedStep

ONE_PLAN_A_SIZE = {"fallback": "eager", "dynamic": False}


class FallingStep(WholeStep):
    """A whole step of which some calls run in eager: there is nothing to say of their arrays."""

    def _check_service(self, batch):
        pass


def own_loop(model=None, **options):
    return OwnLoop(model or SmallNet(), images(1)[0][0], ADAMW, **{**ONE_PLAN_A_SIZE, **options})


def whole_step(model=None, **options):
    return FallingStep(model or SmallNet(), ADAMW, images(1)[0], **{**ONE_PLAN_A_SIZE, **options})


def sizes_in_turn(count, *sizes):
    return [images(1, batch=sizes[index % len(sizes)])[0] for index in range(count)]


@pytest.fixture(params=[own_loop, whole_step])
def make(request):
    return request.param


def test_a_new_size_runs_in_eager_once(make):
    pair = make()
    eager_runs = []
    for batch in sizes_in_turn(8, 2, 5):
        pair.train(batch)
        eager_runs.append(pair.step.stats.eager_runs)
    pair.compare()
    assert eager_runs == [0, 1, 1, 1, 1, 1, 1, 1]
    assert pair.step.stats.cached_plans == 2
    assert_served(pair.step)


def test_sizes_that_never_come_again_are_never_planned(make):
    pair = make().run(sizes_in_turn(6, 3, 4, 5, 6, 7, 9))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (6, 1)


def test_more_sizes_than_plans(make):
    """Plans are not made in turn again and again, and one warning says what changes."""
    pair = make(cache_size_limit=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.run(sizes_in_turn(40, 3, 4, 5, 6))
    told = [str(warning.message) for warning in caught if "run in eager" in str(warning.message)]
    assert len(told) == 1
    assert "most calls of SmallNet" in told[0]
    assert "input 0 has shape" in told[0]
    planned = 40 - pair.step.stats.eager_runs
    assert planned >= 10
    assert pair.step.stats.cached_plans == 2


def test_sizes_are_symbols_from_the_second_new_one_on(make):
    pair = make(dynamic=None).run(sizes_in_turn(9, 2, 3, 4, 5, 6, 7, 9))
    assert (pair.step.stats.eager_runs, pair.step.stats.families) == (1, 1)
    assert_served(pair.step)


def test_every_kind_is_planned_at_once_if_asked(make):
    pair = make(fallback="raise").run(sizes_in_turn(4, 3, 4))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (0, 3)


def test_an_unknown_fallback(make):
    with pytest.raises(olla_fx.OptionError, match="'eager' or 'raise'"):
        make(fallback="sometimes")


class Weighted(nn.Module):
    """A model whose forward reads a number of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.weight = SmallNet(), 0.5

    def forward(self, x):
        if self.weight > 5:
            raise RuntimeError("too heavy")
        return self.net(x) * self.weight


def set_weight(weight):
    def change(model):
        model.weight = weight

    return change


class Exponential(Weighted):
    """Computes with its number what a graph cannot."""

    def forward(self, x):
        return self.net(x) * math.exp(self.weight)


def test_a_number_that_changes_at_every_call(make):
    pair = make(Exponential())

    def anneal():
        for index, batch in enumerate(images(CALLS_BEFORE_WARNING + 4)):
            pair.change(set_weight(0.5 - 0.01 * index))
            pair.train(batch)

    with pytest.warns(RuntimeWarning, match="most calls of Exponential run in eager.*weight changed. Keep"):
        anneal()
    pair.compare()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (CALLS_BEFORE_WARNING + 3, 1)


def test_a_number_that_changes_once(make):
    pair = make(Weighted()).run(images(2))
    pair.change(set_weight(0.25))
    pair.run(images(3))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)
    assert_served(pair.step)


def test_a_state_that_comes_and_goes(make):
    pair = make(Weighted())
    for index, batch in enumerate(images(12)):
        pair.change(set_weight((0.5, 0.25)[index % 2]))
        pair.train(batch)
    pair.compare()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)
    assert_served(pair.step)


def test_training_and_evaluation_in_turn():
    pair = own_loop(nn.Sequential(SmallNet(), nn.Dropout(0.5)))
    for batch in images(4):
        pair.train(batch)
        for _, model, _ in pair.sides():
            model.eval()
        with torch.no_grad():
            assert_same(pair.eager(batch[0]), pair.step(batch[0]), "evaluation")
        for _, model, _ in pair.sides():
            model.train()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)


class Levit(nn.Module):
    """Keeps what its attention adds from one evaluation to the next, until it is trained again."""

    def __init__(self):
        super().__init__()
        skip_without("transformers")
        import_torchvision()
        from transformers import LevitConfig, LevitForImageClassification

        sizes = {"hidden_sizes": [16] * 3, "num_attention_heads": [2] * 3, "key_dim": [8] * 3}
        self.levit = LevitForImageClassification(
            LevitConfig(image_size=64, depths=[1] * 3, num_labels=5, **sizes)
        )

    def forward(self, x):
        return self.levit(x).logits


@pytest.mark.parametrize("way", ["own loop", "whole step"])
def test_an_evaluation_that_cannot_be_planned(way):
    x, y = torch.randn(2, 3, 64, 64), torch.randint(5, (2,))
    if way == "own loop":
        pair = OwnLoop(Levit(), x, ADAMW, **ONE_PLAN_A_SIZE)
    else:
        pair = FallingStep(Levit(), ADAMW, (x, y), **ONE_PLAN_A_SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            pair.train((torch.randn_like(x), y))
            pair.change(nn.Module.eval)
            assert all(not model.training for model in (pair.eager, pair.model))
            with torch.no_grad():
                evaluated = pair.step if way == "own loop" else pair.model
                assert_same(pair.eager(x), evaluated(x), "evaluation")
            pair.change(nn.Module.train)
    pair.train((x, y))
    pair.compare()
    told = [str(warning.message) for warning in caught if "runs in eager" in str(warning.message)]
    assert len(told) == (way == "own loop")
    assert all("Levit" in message and "attention_bias_cache" in message for message in told)
    evaluations = 6 if way == "own loop" else 0
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (evaluations, 1)
    assert_served(pair.step)


def test_a_layer_that_is_swapped(make):
    pair = make(nn.Sequential(SmallNet(), nn.Linear(5, 5), nn.ReLU())).run(images(2))
    pair.change(lambda model: model.__setitem__(2, nn.Tanh()))
    pair.run(images(4))
    assert pair.step.stats.eager_runs == 1
    assert_served(pair.step)


def test_a_hook_that_is_added_later(make):
    pair = make().run(images(2))
    seen = []
    hooks = [model.register_forward_hook(lambda *_: seen.append(None)) for model in (pair.eager, pair.model)]
    with pytest.warns(RuntimeWarning, match="cannot be planned and runs in eager: .*hook") as caught:
        pair.run(images(6))
    assert len([warning for warning in caught if "cannot be planned" in str(warning.message)]) == 1
    assert len(seen) == 12
    for hook in hooks:
        hook.remove()
    before = pair.step.stats.eager_runs
    pair.run(images(2))
    assert pair.step.stats.eager_runs == before
    assert_served(pair.step)


def test_a_hook_that_is_added_later_if_errors_are_asked_for(make):
    pair = make(fallback="raise").run(images(2))
    pair.model.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hook"):
        pair.step(*images(1)[0][: 1 if isinstance(pair, OwnLoop) else 2])


def test_what_optimize_is_called_for_is_planned_or_refused():
    model = SmallNet()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hook"):
        olla_fx.optimize(model, images(1)[0][0])


def test_inputs_that_no_plan_can_tell_apart():
    class Settings:
        factor = 2.0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SmallNet()

        def forward(self, x, settings=None):
            return self.net(x) * (settings.factor if settings else 1.0)

    x = images(1)[0][0]
    pair = OwnLoop(Model(), x, fallback="eager")
    pair.eager.eval()
    pair.step.eval()
    with pytest.warns(RuntimeWarning, match="holds a Settings"):
        given = pair.step(x, settings=Settings())
    assert_same(pair.eager(x, Settings()).detach(), given.detach(), "outputs")


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


def test_forget_all_plans():
    pair = own_loop().run(sizes_in_turn(3, 2, 5))
    pair.replan()
    pair.run(sizes_in_turn(2, 2))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 1)
    assert_served(pair.step)


def test_gradients_that_come_in_another_layout():
    """The kind of call is known, so that the plan for the layout is made at once."""
    pair = OwnLoop(
        nn.Conv2d(3, 4, 3),
        images(1)[0][0],
        loss_fn=lambda outputs, _: (outputs.contiguous(memory_format=torch.channels_last) ** 2).sum(),
        fallback="eager",
    )
    for batch in images(4):
        pair.zero_grad()
        for loss in pair.losses(batch):
            loss.backward()
        pair.update()
    assert pair.step.stats.eager_runs == 0


def test_a_copy_counts_for_itself():
    pair = own_loop().run(sizes_in_turn(3, 2, 5))
    other = copy.deepcopy(pair.step)
    assert other.stats.eager_runs == 0
    x, y = images(1, batch=5)[0]
    F.cross_entropy(other(x), y).backward()
    assert other.stats.eager_runs == 1


def test_a_small_model_that_is_called_many_times_before_backward():
    """A plan that saves nothing beside the run that holds the buffer would only take longer than eager."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    eager = copy.deepcopy(policy)
    planned = olla_fx.optimize(policy, torch.zeros(1, 4))
    states = torch.randn(6, 1, 4)
    for turn in range(1, 5):
        losses = [sum(model(x).square().sum() for x in states) for model in (eager, planned)]
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert planned.stats.eager_runs == 5 * turn
    for theirs, ours in zip(eager.parameters(), policy.parameters(), strict=True):
        assert_close(theirs.grad, ours.grad, "gradient")
    planned(states[0])
    assert_served(planned)
    assert planned.stats.stock_runs == 0


def test_a_large_call_beside_a_small_run_is_planned():
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 2))
    planned = olla_fx.optimize(model, torch.zeros(2048, 4), **ONE_PLAN_A_SIZE)
    small, large = torch.randn(1, 4), torch.randn(2048, 4)
    for x in (large, large, small, small, small):
        planned(x).sum().backward()
    before = planned.stats
    waiting = planned(small)
    assert planned.plan.peak_bytes < 1 << 20
    planned(large).sum().backward()
    assert planned.stats.stock_runs == before.stock_runs + 1
    planned(small).sum().backward()
    assert planned.stats.eager_runs == before.eager_runs + 1
    waiting.sum().backward()


class Tagged(torch.Tensor):
    """Operators give tensors of its class."""


@pytest.mark.parametrize("mode", ["own loop", "inference", "whole step"])
def test_a_tensor_of_a_class_of_its_own(mode):
    model, (x, y) = mlp(), vectors(1)[0]
    tagged = x.as_subclass(Tagged)
    planned = {
        "own loop": lambda example: olla_fx.optimize(model, example),
        "inference": lambda example: olla_fx.optimize(model.eval(), example),
        "whole step": lambda example: olla_fx.optimize(
            model, (example, y), loss_fn=F.cross_entropy, optimizer=sgd(model.parameters())
        ),
    }[mode]
    with pytest.raises(olla_fx.StepInputError, match=r"a Tagged, .*as_subclass\(torch.Tensor\)"):
        planned(tagged)
    eager = copy.deepcopy(model)
    module = planned(x)
    with pytest.warns(RuntimeWarning, match="cannot be planned and runs in eager: an input is a Tagged"):
        answer = module(tagged, y) if mode == "whole step" else module(tagged)
    expected = F.cross_entropy(eager(tagged), y) if mode == "whole step" else eager(tagged)
    assert type(answer) is type(expected) is Tagged
    assert_same(expected.detach(), answer.detach(), "answer")


class Either(nn.Module):
    """Takes one input or more."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, *more):
        return sum(map(self.body, more), self.body(x))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            [lambda module, x, count=count: module(x, *[x] * count) for count in range(1, 20)],
            "another structure. Give it as many inputs",
        ),
        (
            [lambda module, x, size=size: module(x[:1].expand(size, -1)) for size in range(5, 24)],
            "has shape .*. Give it inputs of a few sizes",
        ),
    ],
    ids=["structure", "shape"],
)
def test_the_advice_fits_what_changes(calls, said):
    module, x = olla_fx.optimize(Either(), vectors(1)[0][0], dynamic=False), vectors(1)[0][0]
    with pytest.warns(RuntimeWarning, match=f"most calls of Either run in eager.*{said}"):
        collections.deque((call(module, x) for call in calls), maxlen=0)
