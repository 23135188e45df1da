"""CUDA graphs of planned steps are captured and replayed, whatever their kernels compute.

These tests compare no values, so that they also run on the stand-in for a GPU (``tests/stand_in_gpu``).
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.gpu.steps import SGD, whole_step
from tests.olla_fx.helpers import SmallNet

pytestmark = pytest.mark.usefixtures("without_cudnn")


@pytest.mark.parametrize("capturable", [False, True], ids=["SGD", "Adam with a tensor"])
def test_a_settled_step_is_captured_once_and_replayed(device, capturable):
    rate = torch.full((), 1e-3).to(device)
    make = partial(optim.Adam, lr=rate, foreach=False, capturable=True) if capturable else SGD
    step, batch, optimizer = whole_step(device, make, cuda_graph=True)
    losses = [step(*batch) for _ in range(8)]
    assert step.stats.graphed is not None
    assert (step.stats.graphed.captures, step.stats.graphed.fallback) == (1, None)
    assert step.stats.graphed.replays == 5
    assert len({loss.data_ptr() for loss in losses}) == len(losses)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    for _ in range(5):
        step(*batch)
    assert step.stats.replans == 1


def test_a_learning_rate_that_keeps_changing_ends_the_graphs(device):
    step, batch, optimizer = whole_step(device, cuda_graph=True)
    for _ in range(4):
        step(*batch)
    for index in range(7):
        optimizer.param_groups[0]["lr"] = 0.1 / (index + 2)
        step(*batch)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.warns(RuntimeWarning, match="steps run without a CUDA graph: 8 graphs were captured"):
        step(*batch)
    step(*batch)
    assert step.stats.graphed.captures == 8
    assert step.stats.counts.outside == 0


def test_a_parameter_that_moved_is_captured_anew(device):
    step, batch, optimizer = whole_step(device, cuda_graph=True)
    for _ in range(5):
        step(*batch)
    moved = {name: value.clone() for name, value in step.state_dict().items()}
    step.load_state_dict(moved, assign=True)
    optimizer.param_groups[0]["params"] = list(step.parameters())
    for _ in range(3):
        step(*batch)
    assert step.stats.graphed.captures == 2
    assert step.stats.graphed.fallback is None


def test_a_model_that_writes_to_its_input_runs_without_a_graph(device):
    class Writes(nn.Module):
        """Changes its input, which in a graph would be the graph's own."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1.0) * 2

    module = olla_fx.optimize(
        Writes().eval(), torch.zeros(3, device=device), cuda_graph=True, solver="none", fallback="raise"
    )
    for _ in range(5):
        module(torch.zeros(3, device=device))
    assert module.stats.graphed.captures == 0
    assert "writes to its input" in module.stats.graphed.fallback


@torch.library.custom_op("olla_fx_tests::waiting", mutates_args=())
def waiting(tensor: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    return tensor.clone()


@waiting.register_fake
def _(tensor):
    return torch.empty_like(tensor)


waiting.register_autograd(lambda ctx, gradient: gradient)


class Waits(nn.Module):
    """Waits for the GPU in the middle of its forward, which no graph can hold, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(waiting(self.first(x).relu())))


def test_a_capture_that_fails_leaves_everything_as_it_was(device):
    model = Waits().to(device)
    batch = torch.zeros(4, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)
    step = olla_fx.optimize(
        model,
        batch,
        loss_fn=F.cross_entropy,
        optimizer=SGD(model.parameters()),
        solver="none",
        cuda_graph=True,
        fallback="raise",
    )
    stream = torch.cuda.current_stream(device)
    for _ in range(3):
        step(*batch)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph: capturing failed: CUDA error"):
        step(*batch)
    assert torch.cuda.current_stream(device) == stream
    step(*batch)
    assert step.stats.counts.outside == 0
    assert step.stats.graphed.captures == 0
    # The generator draws, the allocator frees, and the next graph is captured.
    F.dropout(batch[0])
    torch.cuda.empty_cache()
    other, batch, _ = whole_step(device, cuda_graph=True)
    for _ in range(5):
        other(*batch)
    assert (other.stats.graphed.captures, other.stats.graphed.fallback) == (1, None)


def test_a_graph_that_the_caller_captures_does_not_use_the_buffer(device):
    x = torch.zeros(2, 3, 16, 16, device=device)
    module = olla_fx.optimize(
        SmallNet().to(device).eval(), x, solver="none", cuda_graph=True, fallback="raise"
    )
    for _ in range(5):
        module(x)
    replays, served = module.stats.graphed.replays, module.stats.counts
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(x)
    assert (module.stats.graphed.replays, module.stats.counts) == (replays, served)
    module(x)
    assert (module.stats.graphed.replays, module.stats.graphed.captures) == (replays + 1, 1)


def test_a_graph_serves_calls_with_and_without_inference_mode(device):
    x = torch.zeros(2, 3, 16, 16, device=device)
    module = olla_fx.optimize(
        SmallNet().to(device).eval(), x, solver="none", cuda_graph=True, fallback="raise"
    )
    for _ in range(5):
        with torch.inference_mode():
            module(x)
        module(x)
        assert not module(x.clone().requires_grad_()).requires_grad
    assert (module.stats.graphed.captures, module.stats.graphed.fallback) == (1, None)


def test_a_learning_rate_on_the_host_is_no_part_of_a_graph(device):
    make = partial(optim.Adam, lr=torch.tensor(1e-3), foreach=False, capturable=True)
    step, batch, _ = whole_step(device, make, cuda_graph=True)
    for _ in range(5):
        step(*batch)
    assert "lr is on the cpu, and a graph would hold on to its value" in step.stats.graphed.fallback
    assert step.stats.counts.outside == 0
