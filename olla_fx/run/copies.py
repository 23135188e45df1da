"""Copies values that may share a storage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from olla_fx import torch_compat


def copies_of(values: Sequence[Any], positions: Collection[int]) -> list[Any]:
    """Copy some tensors, those in one storage together; return other values as they are.

    Args:
        values: any.
        positions: of the tensors to copy.
    """
    copied: dict[int, torch.UntypedStorage] = {}
    copies = list(values)
    for position in positions:
        value = values[position]
        if isinstance(value, torch.Tensor):
            key = torch_compat.storage_key(value)
            if key not in copied:
                copied[key] = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
            copies[position] = value.new_empty(0).set_(
                copied[key], value.storage_offset(), value.shape, value.stride()
            )
    return copies
