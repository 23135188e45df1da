"""Small models, batches and captured graphs for the tests; the harness runs and compares them."""

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from olla_fx.capture import CapturedStep, Mode, StepRequest, capture
from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.passes import run_passes

Batch = tuple[Any, ...]
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(optim.AdamW, lr=0.05)


def skip_without(package: str) -> None:
    """Skip a test whose models come from a package that is not installed.

    It is not imported: torchvision's import may fail where its models can be built.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def images(count: int, batch: int = 2, size: int = 8, classes: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(batch, 3, size, size, generator=generator),
            torch.randint(classes, (batch,), generator=generator),
        )
        for _ in range(count)
    ]


def vectors(count: int, batch: int = 4, width: int = 6, classes: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(8)
    return [
        (
            torch.randn(batch, width, generator=generator),
            torch.randint(classes, (batch,), generator=generator),
        )
        for _ in range(count)
    ]


def pairs(
    shape: tuple[int, ...], target: tuple[int, ...], count: int = 3, dtype: torch.dtype = torch.float32
) -> list[Batch]:
    """Return random inputs with random targets."""
    return [(torch.randn(*shape).to(dtype), torch.randn(*target).to(dtype)) for _ in range(count)]


class SmallNet(nn.Module):
    """Convolution, batch normalisation, an in-place activation, dropout, frozen and unreached parameters."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.SiLU(inplace=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.unreached = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(hidden)) * self.frozen


def mlp(width: int = 6, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes))


class Written(nn.Module):
    """A model whose forward is given, ``forward(self, *inputs)``; tensors become buffers."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if type(part) is torch.Tensor and not part.requires_grad:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.written = forward

    def forward(self, *inputs: Any) -> Any:
        return self.written(self, *inputs)


def sgd(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def dampened(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make an optimizer whose first step differs from its later ones."""
    return optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


def captured_training(
    model: nn.Module,
    example: Batch,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
    **options: Any,
) -> CapturedStep:
    optimizer = make_optimizer(model.parameters())
    return capture(StepRequest(model, example, Mode.TRAINING, loss_fn, optimizer, **options))


def front(captured: CapturedStep) -> Dataflow:
    """Run the passes on a captured step and read its dataflow."""
    return build_dataflow(run_passes(captured).graph_module, captured.device)
