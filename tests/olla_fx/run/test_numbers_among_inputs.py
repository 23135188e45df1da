"""Python numbers among the inputs of a call are bound late when they change, like those of a model."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from tests.olla_fx.comparisons import assert_same, assert_same_gradients
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, mlp, vectors

VECTORS = vectors(8)


class Scaled(nn.Module):
    """Does something with a number that it is given."""

    def __init__(self, use=lambda y, number: y * number) -> None:
        super().__init__()
        self.body, self.use = mlp(), use

    def forward(self, x, number=1.0):
        return self.use(self.body(x), number)


def in_own_loop(pair, numbers, *, by_name=False):
    """Train with a number at each call."""
    for number, (x, y) in zip(numbers, VECTORS, strict=False):

        def loop(called, _, x=x, y=y, number=number):
            outputs = called(x, number=number) if by_name else called(x, number)
            loss = F.cross_entropy(outputs, y)
            loss.backward()
            return loss.detach()

        pair.zero_grad()
        pair.run_loop(loop)
        pair.update()
    pair.compare()
    return pair.step


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("numbers", [(0.5, 0.4, 0.3, 0.2, 0.1), (17, 12, 40, 3, 8)], ids=["float", "int"])
def test_an_own_loop(numbers, by_name):
    torch.manual_seed(0)
    pair = OwnLoop(Scaled(lambda y, number: y / number), (VECTORS[0][0], numbers[0]))
    step = in_own_loop(pair, numbers, by_name=by_name)
    assert step.stats.cached_plans == 2
    assert_served(step)


def test_a_whole_step():
    torch.manual_seed(0)
    pair = WholeStep(Scaled(), ADAMW, (VECTORS[0][0], 0.5, VECTORS[0][1]))
    for index, (x, y) in enumerate(VECTORS):
        pair.train((x, 0.5 - index / 20, y))
    pair.compare()
    assert pair.step.stats.cached_plans == 2


def test_inference():
    examples = [(x, 1.0 + index) for index, (x, _) in enumerate(VECTORS)]
    assert check_inference(Scaled(), examples, 1).stats.cached_plans == 2


def test_a_decision_by_a_number():
    torch.manual_seed(0)
    model = Scaled(lambda y, number: y * number if number > 1 else y + number)
    step = in_own_loop(OwnLoop(model, (VECTORS[0][0], 2.0)), (2.0, 3.0, 4.0, 0.5, 0.4, 0.3, 5.0, 0.2))
    assert step.stats.cached_plans == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda y, number: y * math.exp(number),
        lambda y, number: F.dropout(y, number),
        lambda y, number: y * (number if isinstance(number, float) else 2.0),
    ],
    ids=["math", "dropout", "isinstance"],
)
def test_a_number_that_stays_a_constant(use):
    torch.manual_seed(0)
    step = in_own_loop(OwnLoop(Scaled(use), (VECTORS[0][0], 0.5)), (0.5, 0.25, 0.125, 0.25, 0.5))
    assert step.stats.cached_plans == 3


def test_numbers_of_other_kinds_have_their_plans():
    torch.manual_seed(0)
    numbers = (0.5, 2, True, 0.5, 3, 0.25, float("inf"), 1.5)
    step = in_own_loop(OwnLoop(Scaled(), (VECTORS[0][0], 0.5)), numbers)
    assert_served(step)


def test_numbers_beside_sizes():
    torch.manual_seed(0)
    pair = WholeStep(Scaled(), ADAMW, (VECTORS[0][0], 0.5, VECTORS[0][1]))
    for index, batch in enumerate((4, 6, 3, 9, 6, 5, 2)):
        pair.train((torch.randn(batch, 6), 0.5 - index / 20, torch.randint(3, (batch,))))
    pair.compare()
    assert pair.step.stats.families == 1


def test_a_loop_with_a_number_that_changes_at_every_call_is_planned():
    torch.manual_seed(0)
    model = Scaled()
    step = olla_fx.optimize(model, (VECTORS[0][0], 0.5), solver="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(30):
            step(VECTORS[0][0], 0.5 + index).sum().backward()
    assert step.stats.eager_runs <= 1
    assert step.stats.cached_plans == 2


def test_two_modules_of_one_model_keep_their_numbers():
    torch.manual_seed(0)
    model = Scaled()
    steps = [olla_fx.optimize(model, (VECTORS[0][0], 0.5), solver="none", fallback="raise") for _ in range(2)]
    for number in (0.5, 0.25, 3.0):
        for step, factor in zip(steps, (1, 2), strict=True):
            x = VECTORS[0][0]
            assert torch.equal(step(x, number * factor), model(x, number * factor))


class SwallowsNames(nn.Module):
    """Takes what it does not name, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x, **others):
        return self.body(x) / others["num_items_in_batch"]


def test_a_number_by_a_name_that_forward_only_swallows():
    model, x = SwallowsNames(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    planned = olla_fx.optimize(model, {"x": x, "num_items_in_batch": 3}, solver="none", fallback="raise")
    for count in range(3, 12):
        outputs = [called(x, num_items_in_batch=count) for called in (eager, planned)]
        assert_same(*outputs, "outputs")
        for output in outputs:
            output.sum().backward()
        assert_same_gradients(eager, model)
    assert_served(planned)
    assert planned.stats.cached_plans == 2
