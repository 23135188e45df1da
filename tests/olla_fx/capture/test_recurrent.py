"""Recurrent cells work in place on slices of one tensor: a captured step keeps eager's strides, and bits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from olla_fx.capture import Mode, StepRequest, capture
from tests.olla_fx.helpers import Twins, captured_training, front

aten = torch.ops.aten
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)


class Recurrent(nn.Module):
    """A recurrent module of which only the sequence is returned."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (partial(nn.GRU, 8, 8), (1, 4, 8)),
        (partial(nn.GRU, 8, 8, 2, dropout=0.2), (5, 4, 8)),
        (partial(nn.GRU, 7, 19, bidirectional=True, batch_first=True), (3, 4, 7)),
        (partial(nn.GRU, 7, 24, bias=False), (2, 3, 7)),
        (partial(nn.RNN, 8, 8, 2), (3, 4, 8)),
    ],
    ids=["gru", "gru-layers", "gru-bidirectional", "gru-unbiased", "rnn"],
)
def test_training(make, shape):
    model = Recurrent(make())
    with torch.no_grad():
        example = torch.randn(shape), torch.randn_like(model(torch.zeros(shape)))
    Twins(model, MOMENTUM, example, F.mse_loss).run([example] * 3)


def test_gates_are_computed_in_place_as_in_eager():
    """Every gate lies in its slice of the matrix product, and no copy is left."""
    example = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    captured = captured_training(Recurrent(nn.GRU(8, 8)), example, loss_fn=F.mse_loss)
    dataflow, report = front(captured)
    targets = [node.target for node in dataflow.operators]
    assert targets.count(aten.sigmoid_.default) == 4
    assert aten.sigmoid.default not in targets
    assert aten.copy.default not in targets
    assert aten.copy_.default not in targets
    assert report.restored >= 10


class Sliced(nn.Module):
    """Works in place on a slice, and reads what is beside it, or all of it, afterwards."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 27)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) * 1.5
        if self.read == "transposed":
            return hidden.t()[2:11].add_(1).tanh_()
        before = hidden.tanh() if self.read == "before" else 0
        hidden[:, 4:13].mul_(x[:, :1]).add_(0.5).sigmoid_()
        if self.read == "beside":
            return hidden[:, 13:].exp() + hidden[:, 4:5]
        return hidden.exp() + before


@pytest.mark.parametrize("read", ["all", "before", "beside", "transposed"])
def test_slices_that_are_overwritten(read):
    torch.manual_seed(3)
    model = Sliced(read)
    example = torch.randn(5, 6), torch.randn(5, 6)
    loss_fn = lambda out, _: (out * out).mean()  # noqa: E731
    Twins(model, MOMENTUM, example, loss_fn).run([example] * 3)


def test_strides_after_a_slice_is_overwritten():
    """The result of an in-place operator has the strides of its argument, as in eager."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).unsafe_chunk(3, 1)[1].sigmoid_().exp()

    captured = capture(StepRequest(Gate().eval(), (torch.randn(4, 24),), Mode.INFERENCE))
    (last,) = captured.graph_module.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert last.args[0].meta["val"].stride() == (24, 1)
