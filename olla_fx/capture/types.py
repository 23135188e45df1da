"""What is to be captured, and what capturing gives."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from olla_fx.capture.inputs import StepInput, TensorSlot, step_modules
from olla_fx.capture.optimizer import OptimizerLayout
from olla_fx.capture.python_state import PythonState
from olla_fx.capture.recipe import Recipe
from olla_fx.errors import CaptureError
from olla_fx.torch_compat import pytree

LossFunction = Callable[..., torch.Tensor]


class Mode(enum.StrEnum):
    """What a captured step does."""

    INFERENCE = "inference"
    """Forward alone."""
    AUTOGRAD = "autograd"
    """Forward, and backward when the caller's own loop asks for it."""
    TRAINING = "training"
    """The whole step: forward, loss, backward and weight update."""


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """How the graph's flat results become what the caller gets.

    Attributes:
        spec: pytree of the answer.
        leaves: for each leaf, the index of a graph result, or the constant itself.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    @property
    def results(self) -> int:
        """How many of the graph's results belong to the answer."""
        return sum(is_result for is_result, _ in self.leaves)

    def rebuild(self, results: Sequence[torch.Tensor]) -> Any:
        """The answer with the caller's own structure."""
        return pytree.tree_unflatten(
            [results[value] if is_result else value for is_result, value in self.leaves], self.spec
        )


@dataclass(frozen=True)
class CapturedStep:
    """A step as one graph.

    Attributes:
        mode: what of the step.
        graph_module: functional but for trailing ``copy_`` into static arrays.
        inputs: what each placeholder is, in order.
        written: indices of the placeholders whose storage the step writes.
        outputs: how results become the answer.
        differentiable: for each result of the answer, whether a tangent comes back for it.
        gradients: indices of the placeholders whose gradients follow the answer among the results.
        recomputed: how many operators are there a second time because the model checkpoints activations.
        slots: the model's tensors with all their places.
        optimizer: what was assumed of the optimizer, when training.
        state_keys: for each parameter that is updated, the keys of its optimizer state.
        module_training: training flag of every module, by name.
        python_state: the Python values that were read and baked.
        device: where everything lives.
        autocast: whether autocast was on, and its dtype.
        kernel_settings: number of threads and the like, on which recorded workspaces depend.
        seconds: wall-clock time of capturing.
    """

    mode: Mode
    graph_module: fx.GraphModule
    inputs: tuple[StepInput, ...]
    written: frozenset[int]
    outputs: OutputLayout
    differentiable: tuple[bool, ...]
    gradients: tuple[int, ...]
    recomputed: int
    slots: tuple[tuple[TensorSlot, ...], ...]
    optimizer: OptimizerLayout | None
    state_keys: Mapping[str, tuple[str, ...]]
    module_training: Mapping[str, bool]
    python_state: PythonState
    device: torch.device
    autocast: tuple[bool, torch.dtype]
    kernel_settings: tuple[object, ...]
    seconds: float


@dataclass(frozen=True)
class StepRequest:
    """What is to be captured.

    Attributes:
        model: the user's; not changed.
        inputs: positional arguments of the model; for training the last one is the target.
        mode: what of it.
        loss_fn: ``loss_fn(model(*inputs), target)`` must give a scalar.
        optimizer: the user's; not changed.
        return_outputs: whether a training step also returns the model's outputs.
        recipe: micro-batches and clipping of a training step.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    mode: Mode
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    return_outputs: bool = False
    recipe: Recipe = field(default_factory=Recipe)

    def modules(self) -> dict[str, nn.Module]:
        """All modules that the step runs, by name."""
        return step_modules(self.model, self.loss_fn)


def plan_device(request: StepRequest, slots: Sequence[Sequence[TensorSlot]]) -> torch.device:
    """The one device of a step's tensors; meta tensors are planned as if on the CPU.

    Raises:
        CaptureError: when they are on several devices.
    """
    modules = request.modules()
    tensors = [places[0].table(modules[places[0].owner])[places[0].key] for places in slots]
    leaves = [each for each in pytree.tree_leaves(request.inputs) if isinstance(each, torch.Tensor)]
    devices = {each.device for each in [*tensors, *leaves]} - {torch.device("meta")}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CaptureError(f"model and inputs are on several devices ({names}); move them to one")
    return devices.pop() if devices else torch.device("cpu")
