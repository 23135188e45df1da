"""What is to be captured, and what capturing gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from olla_fx.errors import CaptureError
from olla_fx.guards import Assumptions, Mode, Role, TensorSlot, TensorSpec, step_modules
from olla_fx.options import Options
from olla_fx.torch_compat import pytree

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """An output that lies in the memory of an input of the graph or of another output.

    It is made anew from that tensor, outside the graph, so that autograd knows the two for views.

    Attributes:
        result: index of the result that it looks into; None for an input.
        placeholder: index of the placeholder that it looks into; None for a result.
        shape: its extents.
        stride: its element strides.
        offset: where it begins, in elements from the other's beginning.
        whole: whether it is the other tensor itself.
        detached: whether autograd is not to follow it.
    """

    result: int | None
    placeholder: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    detached: bool

    def of(self, results: Sequence[torch.Tensor], values: Sequence[Any]) -> torch.Tensor:
        """The output.

        Args:
            results: of the graph.
            values: of its placeholders.
        """
        base: torch.Tensor = (
            values[self.placeholder] if self.placeholder is not None else results[self.result or 0]
        )
        if not self.whole:
            base = base.as_strided(self.shape, self.stride, int(base.storage_offset()) + self.offset)
        return base.detach() if self.detached else base


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """How the graph's flat results become what the caller gets.

    Attributes:
        spec: pytree of the answer.
        leaves: for each leaf, the index of a graph result, or the constant or alias itself.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    @property
    def results(self) -> int:
        """How many of the graph's results belong to the answer."""
        return sum(is_result for is_result, _ in self.leaves)

    def rebuild(self, results: Sequence[torch.Tensor], values: Sequence[Any] = ()) -> Any:
        """The answer with the caller's own structure.

        Args:
            results: of the graph.
            values: of its placeholders, where outputs look into them.
        """
        leaves = [
            results[each]
            if is_result
            else each.of(results, values)
            if isinstance(each, OutputAlias)
            else each
            for is_result, each in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True)
class CapturedStep(Assumptions):
    """A step as one graph, and what it assumes.

    Attributes:
        graph_module: functional but for trailing ``copy_`` into static arrays.
        outputs: how results become the answer.
        differentiable: for each result of the answer, whether a tangent comes back for it.
        gradients: indices of the placeholders whose gradients follow the answer among the results.
        gradient_tangents: for each gradient, the tangents that it depends on.
        recomputed: how many operators are there a second time because the model checkpoints activations.
    """

    graph_module: fx.GraphModule
    outputs: OutputLayout
    differentiable: tuple[bool, ...]
    gradients: tuple[int, ...]
    gradient_tangents: tuple[frozenset[int], ...]
    recomputed: int

    @functools.cached_property
    def tangent_strides(self) -> tuple[tuple[int, ...], ...]:
        """Element strides of the tangents, in order."""
        return tuple(each.stride for each in self._tangents())

    @property
    def tangents_overlap(self) -> bool:
        """Whether a tangent has several elements in one place."""
        return any(each.overlaps_itself for each in self._tangents())

    def _tangents(self) -> list[TensorSpec]:
        specs = [each.spec for each in self.inputs if each.role is Role.TANGENT]
        return [each for each in specs if each is not None]

    @functools.cached_property
    def wanted(self) -> tuple[int, ...]:
        """Indices of the placeholders that want a gradient, tangents aside."""
        return tuple(
            index
            for index, each in enumerate(self.inputs)
            if each.role is not Role.TANGENT and each.spec is not None and each.spec.requires_grad
        )


@dataclass(frozen=True)
class StepRequest:
    """What is to be captured.

    Attributes:
        model: the user's; not changed.
        inputs: positional arguments of the model; for training the last one is the target.
        mode: what of it.
        loss_fn: ``loss_fn(model(*inputs), target)`` must give a scalar.
        optimizer: the user's; not changed.
        options: how to plan and run it.
        tangent_strides: in the caller's own loop, the element strides of the tangents, in order; empty for
            those of the outputs that they belong to.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    mode: Mode
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    options: Options = field(default_factory=Options)
    tangent_strides: tuple[tuple[int, ...], ...] = ()

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
