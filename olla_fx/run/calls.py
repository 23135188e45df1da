"""What kind of call a planned module is given: which mode it runs in, and which plan it needs."""

from __future__ import annotations

import enum
import inspect
import itertools
import warnings
from collections.abc import Hashable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import Mode, TensorSpec
from olla_fx.errors import StepInputError, StepModeError
from olla_fx.torch_compat import pytree

_TELLING = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_training_of = attrgetter("training")


def shows_the_model() -> bool:
    """Whether a call is to run the model itself: something follows its operators, or changes what they do.

    That is a model around it that is being captured or compiled, a ``torch.func`` transform, forward-mode
    differentiation, or the caller's hooks for what is saved for backward.
    """
    if torch.compiler.is_dynamo_compiling() or torch_compat.is_observed() or torch_compat.is_transformed():
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
    """Refuse a whole training step under what it cannot obey.

    Raises:
        StepModeError: when ``torch.func`` or forward-mode differentiation is at work.
    """
    if torch_compat.is_transformed():
        raise StepModeError(
            "a whole training step updates weights, and cannot be transformed by torch.func or be "
            "differentiated in forward mode: call the model itself there"
        )


def in_sequence(
    model: nn.Module, planned: Mode, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Named inputs in the places where the model's forward takes them.

    Args:
        model: the user's.
        planned: what the module was planned for.
        inputs: those given in sequence.
        named: those given by name.

    Raises:
        StepInputError: when the model does not take them so, or the step takes no names.
    """
    if planned is Mode.TRAINING:
        raise StepInputError(
            "a whole training step takes its inputs in sequence, the target last, not by name "
            f"({next(iter(named))}=)"
        )
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*inputs, **named)
    except TypeError as error:
        raise StepInputError(f"{type(model).__name__}.forward: {error}") from error
    given = set(bound.arguments)
    bound.apply_defaults()
    by_name_only = [name for name in bound.kwargs if name in given or name not in signature.parameters]
    if by_name_only:
        raise StepInputError(
            f"{type(model).__name__} takes {by_name_only[0]!r} by name only, which a plan cannot: wrap the "
            "model in one that takes it in sequence"
        )
    names = list(bound.arguments)[: len(bound.args)]
    last = max((index for index, name in enumerate(names) if name in given), default=-1)
    return bound.args[: max(last + 1, len(inputs))]


def mode_of(model: nn.Module, planned: Mode, inputs: tuple[Any, ...]) -> Mode:
    """What a call is to do: in the caller's own loop gradients decide, elsewhere it is planned.

    Raises:
        StepModeError: when the model is in the other mode.
    """
    if planned is not Mode.AUTOGRAD:
        _check_training_flag(model, planned)
        return planned
    return Mode.AUTOGRAD if torch.is_grad_enabled() and wants_gradient(model, inputs) else Mode.INFERENCE


def wants_gradient(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether anything that a forward reads wants a gradient."""
    first = next(model.parameters(), None)
    if first is not None and first.requires_grad:
        return True
    modules = _modules_of(model)
    others = pytree.tree_leaves(inputs)
    for each in modules:
        others += (*each._parameters.values(), *each._buffers.values())
    attributes = list(itertools.chain.from_iterable(map(dict.values, map(vars, modules))))
    # Of the thousands of attributes of some hundred modules hardly one is a tensor.
    if any(issubclass(kind, torch.Tensor) for kind in set(map(type, attributes))):
        others += attributes
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in others)


def call_key(model: nn.Module, planned: Mode, inputs: tuple[Any, ...], mode: Mode) -> Hashable:
    """What tells the plans of a module apart.

    Args:
        model: the user's.
        planned: what the module was planned for.
        inputs: of the call.
        mode: of the call.

    Raises:
        StepInputError: when an input is of a kind that tells no calls apart.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    kinds: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise StepInputError(f"an input is a {leaf.layout} tensor: pass a strided one")
            differentiated = mode is Mode.AUTOGRAD and leaf.requires_grad
            kinds.append(replace(TensorSpec.of(leaf), requires_grad=differentiated))
        elif isinstance(leaf, _TELLING):
            # Not the value alone: 0.0 and -0.0, 1 and True compare equal.
            kinds.append((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf))
        else:
            raise StepInputError(
                f"an input holds a {type(leaf).__name__}, which is no tensor, number, string, tuple, "
                "list or dict, so calls with it cannot be told apart: pass its parts"
            )
    # A whole step that is called in the other mode is refused; elsewhere a change is a plan of its own.
    flags = planned is not Mode.TRAINING and tuple(map(_training_of, _modules_of(model)))
    return mode, spec, tuple(kinds), flags


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules within it, in some order; ``modules()`` takes some ten times as long."""
    seen = {model: None}
    pending = [model]
    while pending:
        for module in pending.pop()._modules.values():
            if module is not None and module not in seen:
                seen[module] = None
                if module._modules:
                    pending.append(module)
    return list(seen)


def _check_training_flag(model: nn.Module, mode: Mode) -> None:
    """Refuse a call in the mode that the step was not planned for.

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
            "this step was planned for inference, but the model is in training mode: call model.eval()"
        )
