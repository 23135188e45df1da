"""Copies that protected an in-place write go; copies that somebody can tell from their source stay."""

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import captured_training, front, images, mlp, sgd, vectors

CLONE = torch.ops.aten.clone.default


class Written(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.body = mlp()
        self.register_buffer("table", torch.ones(4, 3))
        self.written = forward

    def forward(self, x):
        return self.written(self, x)


def clones(model, x):
    """Return the number of copies that the passes leave."""
    captured = capture(StepRequest(model.eval(), (x,), Mode.INFERENCE))
    return sum(node.target is CLONE for node in front(captured).operators)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.ReLU6, nn.Hardswish])
def test_copies_behind_in_place_activations_are_dropped(activation):
    """Each block's input was cloned so that the in-place activation would not hurt it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), activation(inplace=True), nn.Flatten(), nn.Linear(144, 5))
    dataflow = front(captured_training(model, images(1)[0]))
    assert not [node for node in dataflow.operators if node.target is CLONE]


def test_a_copy_in_the_model_that_nobody_can_tell_from_its_source_is_dropped():
    assert clones(Written(lambda self, x: self.body(x).clone().exp()), torch.ones(4, 6)) == 0


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (lambda self, x: self.body(x)[:, :1].clone().exp(), 1),  # a slice would hold the whole
        (lambda self, x: self.body(x).t().clone(memory_format=torch.contiguous_format).view(-1).exp(), 1),
        (lambda self, x: (self.body(x), self.body(x).clone()), 1),  # the caller's own
        (lambda self, x: x.clone(), 1),
        (lambda self, x: self.table.clone() * 2 + self.table.add_(1), 1),  # written to afterwards
        (lambda self, x: self.body(x).sum(0, True).expand(4, 3).clone().exp(), 1),
    ],
    ids=["slice", "transposed", "returned", "input", "mutated buffer", "expanded"],
)
def test_copies_that_stay(forward, kept):
    model = Written(forward)
    x = torch.randn(4, 6)
    left = clones(model, x)
    assert left == kept
    step = olla_fx.optimize(model.eval(), x, solver="none", fallback="raise")
    for _ in range(3):
        table = model.table.clone()
        step.poison()
        answer = step(x)
        after = model.table.clone()
        model.table.copy_(table)
        with torch.no_grad():
            assert_same(model(x), answer, "answer")
        assert_same(model.table, after, "table")


def test_returned_copies_are_the_callers_own():
    def forward(self, x):
        answer = self.body(x)
        return answer, answer.clone()

    step = olla_fx.optimize(Written(forward).eval(), torch.ones(4, 6), solver="none", fallback="raise")
    for _ in range(3):
        answer, other = step(torch.ones(4, 6))
        assert answer.data_ptr() != other.data_ptr()


def test_training_with_returned_clones_of_what_is_updated():
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x), self.body[0].weight.clone(), self.body[0].weight

    pair = WholeStep(
        Copying(),
        sgd,
        vectors(1)[0],
        lambda answer, target: nn.functional.cross_entropy(answer[0], target),
        return_outputs=True,
        outputs=3,
    )
    pair.run(vectors(3))


def test_late_bound_numbers_are_python_numbers():
    """``lr.item()`` is gone: one 0-dim tensor read a number is what functional capture leaves."""
    dataflow = front(captured_training(mlp(), vectors(1)[0]))
    assert ".item" not in dataflow.graph_module.code
    assert "_local_scalar_dense" not in dataflow.graph_module.code
    assert "sym_constrain" not in dataflow.graph_module.code


def test_identities_are_dropped():
    dataflow = front(captured_training(mlp(), vectors(1)[0]))
    targets = [str(node.target) for node in dataflow.graph_module.graph.nodes]
    assert sum("detach" in target or "alias" in target for target in targets) <= 1  # the loss
