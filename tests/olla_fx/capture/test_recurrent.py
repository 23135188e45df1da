"""Recurrent cells work in place on slices of one tensor: a captured step keeps eager's strides, and bits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from olla_fx import operators
from olla_fx.capture import Mode, StepRequest, capture
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import captured_training, front

aten = torch.ops.aten
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)


class Recurrent(nn.Module):
    """A recurrent module of which only the sequence is returned."""

    def __init__(self, cell: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.cell = cell
        self.head = head or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (partial(nn.GRU, 8, 8), (1, 4, 8)),
        (partial(nn.GRU, 8, 8, 2, dropout=0.2), (5, 4, 8)),
        (partial(nn.GRU, 7, 19, bidirectional=True, batch_first=True), (3, 4, 7)),
        (partial(nn.GRU, 7, 24, bias=False), (2, 3, 7)),
        (partial(nn.RNN, 8, 8, 2), (3, 4, 8)),
        (partial(nn.LSTM, 8, 8), (1, 4, 8)),
        (partial(nn.LSTM, 8, 24, 2, dropout=0.2, bidirectional=True), (5, 4, 8)),
        (partial(nn.LSTM, 7, 19, 2, bias=False, batch_first=True), (3, 4, 7)),
        (partial(nn.LSTM, 7, 12, proj_size=5), (3, 4, 7)),
    ],
    ids=[
        "gru",
        "gru-layers",
        "gru-bidirectional",
        "gru-unbiased",
        "rnn",
        "lstm",
        "lstm-bidirectional",
        "lstm-unbiased",
        "lstm-projected",
    ],
)
def test_training(make, shape):
    model = Recurrent(make())
    with torch.no_grad():
        example = torch.randn(shape), torch.randn_like(model(torch.zeros(shape)))
    WholeStep(model, MOMENTUM, example, F.mse_loss).run([example] * 3)


def test_weight_decay_on_both_biases_of_an_lstm():
    """oneDNN gives both biases one tensor as their gradient; an update of one must not reach the other's."""
    model = Recurrent(nn.LSTM(8, 8))
    nn.init.normal_(model.cell.bias_hh_l0)
    example = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    decayed = partial(optim.SGD, lr=0.05, weight_decay=0.1)
    WholeStep(model, decayed, example, F.mse_loss).run([example] * 3)


def test_a_frozen_lstm_in_a_training_step():
    """Its kernel is the one for training all the same, as gradients are enabled."""
    model = Recurrent(nn.LSTM(8, 8).requires_grad_(False), nn.Linear(8, 8))
    example = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    captured = captured_training(model, example, loss_fn=F.mse_loss)
    targets = [node.target for node in captured.graph_module.graph.nodes]
    assert operators.lstm_layer in targets
    assert operators.lstm_layer_backward not in targets


def test_an_lstm_in_inference_keeps_no_workspace():
    captured = capture(StepRequest(nn.LSTM(8, 8).eval(), (torch.randn(3, 4, 8),), Mode.INFERENCE))
    targets = [node.target for node in captured.graph_module.graph.nodes]
    assert aten.mkldnn_rnn_layer.default in targets
    assert operators.lstm_layer not in targets


def test_gates_are_computed_in_place_as_in_eager():
    """Every gate lies in its slice of the matrix product, and no copy is left."""
    example = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    captured = captured_training(Recurrent(nn.GRU(8, 8)), example, loss_fn=F.mse_loss)
    dataflow = front(captured)
    targets = [node.target for node in dataflow.operators]
    assert targets.count(aten.sigmoid_.default) == 4
    assert aten.sigmoid.default not in targets
    assert aten.copy.default not in targets
    assert aten.copy_.default not in targets
    written_over = [node for node in dataflow.operators if node.target._schema.is_mutable]
    assert sum(node.args[0].op != "placeholder" or "out" in node.kwargs for node in written_over) >= 10


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
    WholeStep(model, MOMENTUM, example, loss_fn).run([example] * 3)


def test_strides_after_a_slice_is_overwritten():
    """The result of an in-place operator has the strides of its argument, as in eager."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).unsafe_chunk(3, 1)[1].sigmoid_().exp()

    captured = capture(StepRequest(Gate().eval(), (torch.randn(4, 24),), Mode.INFERENCE))
    (last,) = captured.graph_module.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert last.args[0].meta["val"].stride() == (24, 1)
