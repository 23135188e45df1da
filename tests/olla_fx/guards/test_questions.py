"""One flat function asks later inputs what was asked while capturing."""

import math

import pytest
import torch

from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.guards import QuestionGuard
from tests.olla_fx.helpers import Written


def guard_of(forward, *inputs: torch.Tensor) -> QuestionGuard:
    return QuestionGuard(capture(StepRequest(Written(forward).eval(), inputs, Mode.INFERENCE)).questions)


def branching(self, x, lengths):
    if lengths.max() > 2 and not (x < 0).any():
        return x.exp()
    return x.sin()


def test_the_first_other_answer_is_told():
    x, lengths = torch.ones(2), torch.tensor([3, 2])
    guard = guard_of(branching, x, lengths)
    assert guard.ask([x, lengths]) == (None, ())
    assert guard.ask([-x, lengths]) == (1, True)
    assert guard.ask([x, lengths - 2]) == (0, False)
    assert guard.ask([-x, lengths - 2]) == (0, False)


def test_modes_of_the_caller_change_no_answer():
    x, lengths = torch.ones(2, requires_grad=True), torch.tensor([3, 2])
    guard = guard_of(lambda self, x: x.exp() if int((x @ x).item()) else x.sin(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert guard.ask([x + 0]) == (None, ())
    with torch.inference_mode():
        assert guard.ask([x.detach()]) == (None, ())
    assert guard.ask([x * 2])[1] == 8.0
    assert guard_of(branching, x.detach(), lengths).ask([x, lengths]) == (None, ())


@pytest.mark.parametrize(
    ("value", "other"), [(math.nan, 1.0), (0.0, -0.0), (math.inf, -math.inf), (0.1, math.nextafter(0.1, 1))]
)
def test_floats_are_compared_by_their_bits(value, other):
    def number(value):
        return torch.tensor(value, dtype=torch.float64)

    guard = guard_of(lambda self, x: x.exp() if math.isnan(x.item()) else x.sin(), number(value))
    assert guard.ask([number(value)]) == (None, ())
    assert guard.ask([number(other)])[0] == 0


def test_lists_are_compared():
    guard = guard_of(lambda self, x, n: x.split(n.tolist())[0].exp(), torch.ones(3), torch.tensor([1, 2]))
    assert guard.ask([torch.ones(3), torch.tensor([1, 2])]) == (None, ())
    assert guard.ask([torch.ones(3), torch.tensor([2, 1])]) == (0, [2, 1])


def test_constants_are_computed_once_and_shared_steps_once():
    def forward(self, x):
        shifted = x - torch.arange(3)
        return x.exp() if (shifted > 0).all() and not (shifted > 5).all() else x.sin()

    guard = guard_of(forward, torch.full((3,), 4.0))
    assert "arange" not in str([value for value in guard.source.split() if "arange" in value])
    assert guard.source.count("inputs[0]") == 1
    assert guard.ask([torch.full((3,), 3.0)]) == (None, ())
    assert guard.ask([torch.zeros(3)]) == (0, False)


def test_results_of_an_operator_that_has_several():
    def forward(self, x):
        values, places = x.max(0)
        return x.exp() if values.sum() > 0 and places.sum() > 0 else x.sin()

    guard = guard_of(forward, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert guard.ask([torch.tensor([[0.0, 1.0], [2.0, 3.0]])]) == (None, ())
    assert guard.ask([torch.tensor([[2.0, 3.0], [0.0, 1.0]])]) == (1, False)
    halves = guard_of(lambda self, x: x.exp() if x.split(1)[1].sum() > 0 else x.sin(), torch.ones(2))
    assert halves.ask([torch.tensor([1.0, -1.0])]) == (0, False)
