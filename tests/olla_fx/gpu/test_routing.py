"""Planned steps on CUDA are served from the buffer, whatever their kernels compute.

These tests compare no values, so that they also run on the stand-in for a GPU (``tests/stand_in_gpu``), where
convolutions take kernels of PyTorch's own, for want of cuDNN.
"""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.errors import CaptureError
from olla_fx.models import build_model
from tests.olla_fx.gpu.steps import SGD, batch_on, whole_step
from tests.olla_fx.harness import assert_served, assert_served_if_settled
from tests.olla_fx.helpers import SmallNet, skip_without

pytestmark = pytest.mark.usefixtures("without_cudnn")
MODELS = (
    "torchvision:resnet18",
    "torchvision:mobilenet_v2",
    "torchvision:squeezenet1_0",
    "torchvision:vit_b_16",
    "torchvision:convnext_tiny",
    "torch:transformer",
    "transformers:bert",
    "transformers:gpt2",
    "transformers:llama",
)


def blocks_of(size_bytes):
    """Return the number of blocks of a size that are in use."""
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return sum(
        block["state"] == "active_allocated" and block["requested_size"] == size_bytes for block in blocks
    )


@pytest.mark.parametrize("name", MODELS)
def test_models_are_served_but_for_the_loss(device, name):
    if not name.startswith("torch:"):
        skip_without(name.split(":")[0])
    size = {"torchvision:vit_b_16": 224}.get(name, 64) if name.startswith("torchvision") else None
    case = build_model(name, batch_size=2, image_size=size, tokens=8)
    batch = tuple(tensor.to(device) for tensor in case.inputs)
    model = case.model.to(device)
    step = olla_fx.optimize(
        model, batch, loss_fn=case.loss_fn, optimizer=SGD(model.parameters()), solver="none", fallback="raise"
    )
    for _ in range(4):
        step(*batch)
        assert_served_if_settled(step, 1)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(getattr(optim, name), lr=1e-3, foreach=False, capturable=capturable)
        for name in ("Adam", "AdamW", "NAdam", "Adamax", "Adadelta", "RMSprop", "Rprop")
        for capturable in (False, True)
        # Rprop outside of graphs asks for memory by its gradients' values.
        if capturable or name != "Rprop"
    ],
    ids=lambda make: f"{make.func.__name__}{' capturable' * make.keywords['capturable']}",
)
def test_optimizers_keep_their_numbers_out_of_the_buffer(device, make_optimizer):
    step, batch, _ = whole_step(device, make_optimizer)
    for _ in range(4):
        step(*batch)
        assert_served_if_settled(step, 1)


def test_a_settled_step_takes_its_loss_and_nothing_else(device):
    step, batch, _ = whole_step(device)
    for _ in range(4):
        step(*batch)
    gc.collect()
    settled = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss = step(*batch)
    assert torch.cuda.max_memory_allocated(device) - settled == 512
    buffer_bytes = step.plan.buffer_bytes
    assert blocks_of(buffer_bytes) == 1
    del loss, step
    gc.collect()
    assert blocks_of(buffer_bytes) == 0


def test_plans_for_other_shapes_share_one_buffer(device):
    step, (x, y), _ = whole_step(device)
    for _ in range(4):
        step(x, y)
    larger = step.plan.buffer_bytes
    for _ in range(4):
        step(x[:2], y[:2])
    assert step.stats.counts.outside == 0
    assert step.plan.buffer_bytes < larger
    gc.collect()
    settled = torch.cuda.memory_allocated(device)
    step(x, y)
    assert torch.cuda.memory_allocated(device) == settled
    assert blocks_of(larger) == 1
    del step
    gc.collect()
    assert blocks_of(larger) == 0


def test_a_switch_of_streams_disturbs_no_plan(device):
    step, batch, _ = whole_step(device)
    for _ in range(4):
        step(*batch)
    for stream in (torch.cuda.Stream(device), torch.cuda.current_stream(device)):
        with torch.cuda.stream(stream):
            step(*batch)
        assert step.stats.counts.outside == 0
    assert step.stats.replans == 0


def test_the_callers_own_loop_is_served_but_for_outputs_and_gradients(device):
    model = SmallNet().to(device)
    x, y = batch_on(device)
    module = olla_fx.optimize(model, x, solver="none", fallback="raise")
    for _ in range(4):
        F.cross_entropy(module(x), y).backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert_served(module)
    assert module.stats.counts.outputs >= len(trained) + 1
    assert not module.stats.is_busy


def test_a_model_that_moves_to_the_gpu_takes_its_buffer_along(device):
    model = SmallNet().eval()
    x = torch.zeros(2, 3, 16, 16)
    module = olla_fx.optimize(model, x, solver="none", fallback="raise")
    for _ in range(3):
        module(x)
    module.to(device)
    for _ in range(3):
        answer = module(x.to(device))
    assert answer.is_cuda
    assert_served(module)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_a_fused_optimizer_counts_its_steps_where_its_kernel_does(device, kind):
    with pytest.warns(UserWarning, match="captured as its single-tensor form"):
        step, batch, optimizer = whole_step(device, partial(kind, lr=1e-3, fused=True))
    for _ in range(4):
        step(*batch)
        assert_served_if_settled(step, 1)
    assert {state["step"].device for state in optimizer.state.values()} == {device}
    assert optimizer.param_groups[0]["capturable"] is False
    rate = torch.zeros((), device=device)
    optimizer.param_groups[0]["lr"] = rate
    for _ in range(4):
        step(*batch)
    rate.fill_(1e-3)
    step(*batch)
    assert (step.stats.replans, step.stats.counts.outside) == (1, 0)


class Elsewhere(nn.Module):
    """Computes a part on another device."""

    def __init__(self, other: torch.device) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).to(self.other) * 2).to(x.device) + 1


def test_a_second_device_in_a_step_is_left_to_the_stock_allocator(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1 - device.index)
    x = torch.zeros(2, 8, device=device)
    module = olla_fx.optimize(Elsewhere(other).to(device).eval(), x, solver="none", fallback="raise")
    for _ in range(4):
        module(x)
    assert module.stats.binding == "buffer"
    assert (module.stats.counts.served, module.stats.counts.outside) == (2, 0)


def test_a_step_on_another_device_than_the_present_one_is_served(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    step, batch, _ = whole_step(torch.device("cuda", 1 - device.index), cuda_graph=True)
    for _ in range(6):
        loss = step(*batch)
        step.poison()
    assert loss.device != device
    assert torch.cuda.current_device() == device.index
    assert (step.stats.counts.outside, step.stats.graphed.captures, step.stats.graphed.fallback) == (
        0,
        1,
        None,
    )


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.AUTOGRAD])
def test_batch_norm_of_a_model_in_eval_mode_is_cudnns_own(device, mode):
    """Its form without a ``cudnn_`` has a kernel for the CPU alone."""
    model = SmallNet().to(device).eval()
    with torch.backends.cudnn.flags(enabled=True):
        captured = capture(StepRequest(model, batch_on(device)[:1], mode, None, None))
    norms = {str(node.target) for node in captured.graph_module.graph.nodes if "norm" in str(node.target)}
    backward = {"aten.native_batch_norm_backward.default"} if mode is Mode.AUTOGRAD else set()
    assert norms == {"aten.cudnn_batch_norm.default"} | backward


class Recurrent(nn.Module):
    """Reads a sequence, and classifies by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def test_recurrent_layers_are_planned_without_cudnn_and_refused_with_it(device):
    model = Recurrent().to(device)
    batch = torch.zeros(4, 6, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)
    options = {"loss_fn": F.cross_entropy, "optimizer": SGD(model.parameters()), "solver": "none"}
    step = olla_fx.optimize(model, batch, **options)
    for _ in range(4):
        step(*batch)
        assert_served_if_settled(step, 1)
    with (
        torch.backends.cudnn.flags(enabled=True),
        pytest.raises(CaptureError, match=r"layers is a recurrent layer.*cudnn.flags\(enabled=False\)"),
    ):
        olla_fx.optimize(model, batch, **options)
