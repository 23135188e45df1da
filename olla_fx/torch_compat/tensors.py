"""What tensors, operators and nested structures are, by names that PyTorch keeps to itself."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakTensorKeyDictionary

pytree = _pytree

OpOverload = torch._ops.OpOverload

TorchDispatchMode = _python_dispatch.TorchDispatchMode

UNINITIALIZED = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
"""What lazy modules hold before their first call."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two live tensors share exactly if they share their storage."""
    return int(tensor.untyped_storage()._cdata)


def tensor_dictionary() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary whose keys are tensors, by identity; it does not keep them alive."""
    dictionary: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
    return dictionary
