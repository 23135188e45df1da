"""Trains a model twice, planned and eager, and compares the two bit for bit."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import olla_fx
from olla_fx import PlannedModule
from olla_fx.capture import CapturedStep, Mode, StepRequest, capture
from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.passes import RewriteReport, rewrite

Batch = tuple[Any, ...]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements: -0.0 is not +0.0, and NaN is itself."""
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_same(left: object, right: object, what: str) -> None:
    """Compare two structures of tensors and numbers, bit for bit."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    assert left_spec == right_spec, what
    for one, other in zip(left_leaves, right_leaves, strict=True):
        if isinstance(one, torch.Tensor):
            assert same_bits(one, other), f"{what}: {one} is not {other}"
        else:
            assert one == other, what


def assert_same_models(eager: nn.Module, planned: nn.Module) -> None:
    for left, right in (
        (dict(eager.named_parameters()), dict(planned.named_parameters())),
        (dict(eager.named_buffers()), dict(planned.named_buffers())),
    ):
        assert left.keys() == right.keys()
        for name in left:
            assert_same(left[name], right[name], name)


def assert_same_optimizers(eager: torch.optim.Optimizer, planned: torch.optim.Optimizer) -> None:
    for left_group, right_group in zip(eager.param_groups, planned.param_groups, strict=True):
        for index, (left, right) in enumerate(zip(left_group["params"], right_group["params"], strict=True)):
            one, other = eager.state.get(left, {}), planned.state.get(right, {})
            one = {key: value for key, value in one.items() if value is not None}
            other = {key: value for key, value in other.items() if value is not None}
            assert one.keys() == other.keys(), f"parameter {index}"
            for key in one:
                assert_same(one[key], other[key], f"{key} of parameter {index}")


def assert_served(step: PlannedModule, calls: int, outputs: int) -> None:
    """After ``calls`` calls: every array is in the buffer but what the caller got."""
    assert step.binding == "buffer"
    # On CUDA the first call warms up libraries, and the second is the recorded one.
    settling = 2 if any(each.is_cuda for each in step.parameters()) else 1
    if calls > settling:
        assert step.counts.outputs == outputs
        assert step.counts.served > 0
        assert step.counts.outside == 0, step.outside_log


def skip_without(package: str) -> None:
    """Skip a test whose models come from a package that is not installed.

    It is not imported: torchvision's import may fail where its models can be built.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def random_states() -> list[torch.Tensor]:
    """Of the generators of all devices that are in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


class Twins:
    """One model twice, from the same weights: trained in eager, and by a planned step."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        example: Batch,
        loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
        *,
        scheduler: Scheduler | None = None,
        outputs: int = 1,
        **options: Any,
    ) -> None:
        self.eager, self.planned = copy.deepcopy(model), model
        self.optimizers = [make_optimizer(each.parameters()) for each in (self.eager, self.planned)]
        self.schedulers = [scheduler(each) for each in self.optimizers] if scheduler else []
        self.loss_fn = loss_fn
        self.return_outputs = options.get("return_outputs", False)
        self.outputs = outputs
        self.calls = 0
        self.step = olla_fx.optimize(
            self.planned,
            example,
            loss_fn=loss_fn,
            optimizer=self.optimizers[1],
            **{"solver": "none", **options},
        )

    def train_eager(self, batch: Batch) -> Any:
        *inputs, target = batch
        self.optimizers[0].zero_grad()
        answer = self.eager(*inputs)
        loss = self.loss_fn(answer, target)
        loss.backward()
        self.optimizers[0].step()
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, answer)
        return (loss.detach(), detached) if self.return_outputs else loss.detach()

    def train(self, batch: Batch, seed: int | None = None) -> None:
        """One step of both, compared."""
        seed = self.calls if seed is None else seed
        batch, again = pytree.tree_map_only(torch.Tensor, torch.clone, (batch, batch))
        torch.manual_seed(seed)
        expected = self.train_eager(batch)
        state = random_states()
        self.step.poison()
        torch.manual_seed(seed)
        given = self.step(*again)
        self.calls += 1
        assert_same(expected, given, f"answer of step {self.calls}")
        assert_same(batch, again, "inputs")
        assert all(map(torch.equal, state, random_states())), "random numbers drawn"
        assert_served(self.step, self.calls, self.outputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for each in self.schedulers:
                each.step()

    def compare(self) -> None:
        assert_same_models(self.eager, self.planned)
        assert_same_optimizers(*self.optimizers)

    def run(self, batches: Iterable[Batch]) -> "Twins":
        for batch in batches:
            self.train(batch)
        self.compare()
        return self


def check_inference(
    model: nn.Module, examples: Sequence[Batch], outputs: int, **options: Any
) -> PlannedModule:
    """Plan a model's inference on the first example and compare with eager on all."""
    model.eval()
    step = olla_fx.optimize(model, examples[0], **{"solver": "none", **options})
    for calls, example in enumerate(examples, 1):
        with torch.no_grad():
            expected = model(*example)
        step.poison()
        assert_same(expected, step(*example), f"answer of call {calls}")
        assert_served(step, calls, outputs)
    return step


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


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def captured_training(
    model: nn.Module,
    example: Batch,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
    **options: Any,
) -> CapturedStep:
    optimizer = make_optimizer(model.parameters())
    return capture(StepRequest(model, example, Mode.TRAINING, loss_fn, optimizer, **options))


def front(captured: CapturedStep) -> tuple[Dataflow, RewriteReport]:
    """Rewrite a captured step and read its dataflow."""
    graph_module, report = rewrite(captured)
    return build_dataflow(graph_module, captured.device), report
