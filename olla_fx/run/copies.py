"""Copies of values that may lie in one storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from olla_fx import torch_compat


def copies_of(values: Sequence[Any]) -> list[Any]:
    """Copy all tensors, those in one storage together; return other values as they are."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    storages = {torch_compat.storage_key(each): each.untyped_storage() for each in tensors}
    copied = {key: storage.clone() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
    return [
        each.new_empty(0).set_(
            copied[torch_compat.storage_key(each)], each.storage_offset(), each.shape, each.stride()
        )
        if isinstance(each, torch.Tensor)
        else each
        for each in values
    ]
