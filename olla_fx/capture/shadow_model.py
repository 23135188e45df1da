"""A structural copy of a model to trace, so that tracing cannot touch the user's.

Modules and their Python attributes are copied, tensors are not. After tracing, the copy's attributes
are compared with what they were: a forward that counts its calls or keeps a tensor for the next one
would run that code once, while capturing, and never again, so it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture.inputs import TensorSlot
from olla_fx.errors import CaptureError

_DEEPEST = 4
_PLAIN = (int, float, bool, str, bytes, type(None))
_MODULE_TABLES = frozenset(nn.Module().__dict__) | {"_flat_weights"}


class ShadowModel:
    """A copy of a model into which other tensors can be put."""

    def __init__(self, model: nn.Module, slots: Sequence[Sequence[TensorSlot]]) -> None:
        """Copy the modules of ``model``.

        Args:
            model: the user's; not changed.
            slots: its tensors, from :func:`~olla_fx.capture.inputs.tensor_slots`.

        Raises:
            CaptureError: when hooks hang on it or it cannot be copied.
        """
        _refuse_hooks(model)
        originals = dict(model.named_modules())
        tensors = [slot.table(originals[slot.owner])[slot.key] for places in slots for slot in places]
        tensors += [
            value
            for module in originals.values()
            for value in module.__dict__.values()
            if isinstance(value, torch.Tensor)
        ]
        try:
            self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied for capturing ({error}): keep tensors as "
                "parameters or buffers"
            ) from error
        self._modules = dict(self.model.named_modules())
        self._slots = slots

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace every tensor, tied places together; one tensor for each entry of the slots."""
        for places, tensor in zip(self._slots, tensors, strict=True):
            for slot in places:
                slot.table(self._modules[slot.owner])[slot.key] = tensor
        for module in self._modules.values():
            if isinstance(module, nn.RNNBase):
                # Recurrent modules keep their parameters in a list, too.
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def attributes(self) -> dict[str, object]:
        """A comparable picture of all Python attributes and loose tensors of the copy."""
        known = {(slot.owner, slot.key) for places in self._slots for slot in places}
        picture: dict[str, object] = {}
        for owner, module in self._modules.items():
            hooked = bool(torch_compat.module_hooks(module))
            for key, value in module.__dict__.items():
                if key in _MODULE_TABLES - {"training"} or (owner, key) in known:
                    continue
                if isinstance(value, torch.Tensor) and hooked:
                    continue  # weight_norm and spectral_norm recompute it in their hook at every call
                picture[f"{owner}.{key}".lstrip(".")] = _picture_of(value)
        return picture


def refuse_side_effects(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Refuse a model whose forward changed its own attributes.

    Raises:
        CaptureError: naming the attribute.
    """
    changed = sorted(
        name for name in {*before, *after} if before.get(name, "absent") != after.get(name, "absent")
    )
    if changed:
        raise CaptureError(
            f"the model's forward changes its attribute {changed[0]!r}; a captured step would not repeat "
            "that. Keep such state in a registered buffer that is updated in place, or outside the model"
        )


def _picture_of(value: object, depth: int = 0) -> object:
    """A value that differs when the object was changed; objects are looked into a few levels deep."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), value._version
    if depth == _DEEPEST or isinstance(value, nn.Module | type) or callable(value):
        return type(value).__name__
    if isinstance(value, Mapping):
        return [(str(key), _picture_of(each, depth + 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, [_picture_of(each, depth + 1) for each in value]
    fields = getattr(value, "__dict__", None)
    return type(value).__name__, _picture_of(fields, depth + 1) if fields else None


def _refuse_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for hook in torch_compat.module_hooks(module):
            owner: Any = getattr(hook, "__module__", None) or type(hook).__module__
            if not str(owner).startswith("torch.nn.utils"):
                raise CaptureError(
                    f"module {name or type(model).__name__!r} has the hook "
                    f"{getattr(hook, '__qualname__', hook)!r}: it would run once, while capturing, and in no "
                    "step. Remove it, or put its work into the module's forward"
                )
    for name, parameter in model.named_parameters():
        if torch_compat.tensor_hooks(parameter):
            raise CaptureError(
                f"parameter {name!r} has gradient hooks: a captured step makes no .grad for them to see. "
                "Remove them"
            )
