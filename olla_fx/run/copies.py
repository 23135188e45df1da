"""Copies values that may share a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from olla_fx import torch_compat


def copies_of(values: Sequence[Any]) -> list[Any]:
    """Copy all tensors, those in one storage together; return other values as they are."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    storages = {torch_compat.storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    copied = {key: storage.clone() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
    return [
        value.new_empty(0).set_(
            copied[torch_compat.storage_key(value)], value.storage_offset(), value.shape, value.stride()
        )
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
