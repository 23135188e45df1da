"""Tells the kinds of calls that a planned module is given apart: their modes, and the plans they need."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import Mode
from olla_fx.errors import StepInputError, StepModeError
from olla_fx.guards import other_libraries
from olla_fx.guards.numbers import is_number
from olla_fx.torch_compat import pytree

_PARTS_OF_KIND = {
    "shape": "Give it inputs of a few sizes (pad them, or sort them into buckets)",
    "strides": "Give it inputs that lie in memory alike (tensor.contiguous())",
    "type": "Give it inputs of one type",
    "device": "Give it inputs on one device",
    "wanted gradient": "Let the same inputs want a gradient at every call",
}
"""What the key of a call tells tensors apart by, and what helps if it differs at every call."""

_TELLING = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)


def shows_the_model() -> bool:
    """Return True if a call is to run the model itself: something follows its operators, or changes them.

    That is a model around it that is being captured, compiled or traced, a ``torch.func`` transform,
    forward-mode differentiation, or the caller's hooks for what is saved for backward.
    """
    # Dynamo follows the first question alone.
    if torch.compiler.is_dynamo_compiling() or torch_compat.is_traced_by_torchscript():
        return True
    if torch_compat.is_observed() or torch_compat.is_transformed():
        return True
    hooked = torch_compat.saves_tensors_through_hooks()
    if hooked:
        warnings.warn(
            "a planned module is called within torch.utils.checkpoint, or under other hooks for saved "
            "tensors: it runs without its plan, since activations in the buffer never reach them. Checkpoint "
            "parts within the model instead, whose recomputation is planned",
            RuntimeWarning,
            stacklevel=5,
        )
    return hooked


def refuse_transforms() -> None:
    """Refuse a whole training step under a transform that it cannot obey.

    Raises:
        StepModeError: if ``torch.func``, forward-mode differentiation or ``torch.jit.trace`` is at work.
    """
    if torch_compat.is_traced_by_torchscript() or torch_compat.is_transformed():
        raise StepModeError(
            "a whole training step updates weights, and cannot be transformed by torch.func, be "
            "differentiated in forward mode or be traced by torch.jit: use the model itself there"
        )


Key = Hashable
"""The key of a kind of call, by its inputs alone."""


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of one call.

    Attributes:
        inputs: in sequence.
        key: what tells calls apart by their inputs alone.
        tensors: those among the inputs, flat, with lazy conjugation and negation carried out, since no kernel
            of a plan looks at their bits.
        numbers: the Python numbers among the inputs, by their positions. They are no part of the key, but
            guarded, or bound late, like those that the model keeps.
    """

    inputs: tuple[Any, ...]
    key: Key
    tensors: list[torch.Tensor]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, planned: Mode, inputs: tuple[Any, ...]) -> Call:
        """Look at the inputs of a call.

        Args:
            planned: what the module was planned for.
            inputs: of the call.

        Raises:
            StepInputError: if an input is of a kind that tells no calls apart.
        """
        differentiates = planned is Mode.AUTOGRAD and torch.is_grad_enabled()
        leaves, spec = torch_compat.flat(inputs)
        kinds: list[Hashable] = [differentiates, spec]
        tensors, numbers = [], {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if not torch_compat.makes_plain_tensors(leaf):
                    raise StepInputError(
                        f"an input is a {type(leaf).__name__}, a tensor whose class decides what operators "
                        "do and return, and a plan runs none of it: pass input.as_subclass(torch.Tensor)"
                    )
                if leaf.layout is not torch.strided:
                    raise StepInputError(f"an input is a {leaf.layout} tensor: pass a strided one")
                wants_gradient = differentiates and leaf.requires_grad
                kinds.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, wants_gradient))
                tensors.append(leaf.resolve_conj().resolve_neg())
            elif is_number(leaf):
                kinds.append((type(leaf),))
                numbers[str(index)] = leaf
            elif isinstance(leaf, _TELLING):
                # Not the value alone: 0.0 and -0.0, 1 and True compare equal.
                kinds.append((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf))
            else:
                advice = other_libraries.advice_on(leaf)
                raise StepInputError(
                    f"an input holds a {type(leaf).__name__}, which is no tensor, number, string, tuple, "
                    f"list or dict, so calls with it cannot be told apart: {advice or 'pass its parts'}"
                )
        return cls(inputs, tuple(kinds), tensors, numbers)


def structure_of(key: Hashable) -> Hashable:
    """Return what tells calls apart but for the sizes of their tensors."""
    if not isinstance(key, tuple):
        return key
    return tuple(
        (len(kind[0]), *kind[2:]) if isinstance(kind, tuple) and isinstance(kind[0], tuple) else kind
        for kind in key
    )


def what_differs(key: Key, planned: Key) -> tuple[str, str]:
    """Return in words how the inputs of a call differ from those that a plan is for, and what helps.

    Args:
        key: of the call.
        planned: that of the plan.
    """
    new, old = cast(tuple[Any, ...], key), cast(tuple[Any, ...], planned)
    if new[1] != old[1]:
        return "the inputs have another structure", "Give it as many inputs, nested alike, at every call"
    if new[0] != old[0]:
        return (
            "gradients are wanted or not",
            "Plan the model twice, for calls that want gradients and for those that do not",
        )
    for index, (kind, other) in enumerate(zip(new[2:], old[2:], strict=True)):
        if kind == other:
            continue
        if len(kind) == len(other) == 2:
            advice = "Give what is no tensor a few values, or hand it over in a tensor"
            return f"input {index} is {kind[1]!r}, and was {other[1]!r}", advice
        if len(kind) != len(other) or len(kind) == 1:
            return f"input {index} is of another kind", "Give it inputs of the same kinds at every call"
        for (name, advice), one, two in zip(_PARTS_OF_KIND.items(), kind, other, strict=False):
            if one != two:
                return f"input {index} has {name} {one}, and had {two}", advice
    return "the layout of its gradients", "Let its losses hand their gradients in in one memory layout"


def call_kind(model: nn.Module, planned: Mode, inputs: tuple[Any, ...]) -> tuple[Mode, Hashable]:
    """Return the mode of a call and the modules' training flags, whose change is no change of the model.

    In the caller's own loop gradients decide the mode, elsewhere it is planned. A whole training step that is
    called in another mode is refused, so that its flags are a part of the model.
    """
    flags = planned is not Mode.TRAINING and tuple(module.training for module in model.modules())
    if planned is not Mode.AUTOGRAD:
        return planned, flags
    differentiates = torch.is_grad_enabled() and _wants_gradient(model, inputs)
    return Mode.AUTOGRAD if differentiates else Mode.INFERENCE, flags


def _wants_gradient(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Return True if anything that a forward reads wants a gradient."""
    tensors = pytree.tree_leaves(inputs)
    for module in model.modules():
        tensors += (tensor for _, tensor in torch_compat.own_tensors(module))
        tensors += vars(module).values()
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


def check_training_flag(model: nn.Module, mode: Mode) -> None:
    """Refuse a call in a mode that the step was not planned for.

    Raises:
        StepModeError: saying which call to make.
    """
    if mode is Mode.TRAINING and not model.training:
        raise StepModeError(
            "this is a whole training step, but the model is in eval mode: call model.train() first, or "
            "plan an inference with olla_fx.optimize(model.eval(), example_input)"
        )
    if mode is Mode.INFERENCE and model.training:
        raise StepModeError(
            "this step was planned for inference, but the model is in training mode: call model.eval(), or "
            "plan it for training with olla_fx.optimize(model.train(), example_input)"
        )
