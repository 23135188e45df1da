"""Adds gradients to ``.grad`` in autograd's place; see ``csrc/accumulation.h``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from olla_fx import torch_compat
from olla_fx.arena.native import native_module


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What a backward asks of the native allocator for every gradient; looked up once, as it asks often.

    Attributes:
        accumulates_alone: return True if the backward under way may add its gradient to a tensor's ``.grad``
            itself, given the tensor and how many edges lead to it as far as the caller knows, over one of
            which something comes. False for a tensor that is no leaf.
        accumulate: add a gradient to the ``.grad`` of a leaf that accumulates alone, as autograd does, or
            make it that; given the leaf, the gradient, and True if nobody else uses the gradient's memory,
            so that it may become ``.grad`` itself. What it allocates in planned code is not counted there.
        storage_address: return what tells a tensor's storage apart from others that exist. It does not ask
            Python for the storage, whose object would count as another user of it.
        shares_storage: return True if other tensors look into a tensor's memory, or nobody can tell.
    """

    accumulates_alone: Callable[[torch.Tensor, int], bool]
    accumulate: Callable[[torch.Tensor, torch.Tensor, bool], None]
    storage_address: Callable[[torch.Tensor], int]
    shares_storage: Callable[[torch.Tensor], bool]


def accumulation(device: torch.device) -> Accumulation:
    """Return how gradients are accumulated on a device: without its native allocator, never directly."""
    native = native_module(device.type)
    if native is None:
        return _BY_AUTOGRAD
    return Accumulation(
        native.accumulates_alone, native.accumulate, native.storage_address, native.shares_storage
    )


def _accumulates_never(leaf: torch.Tensor, edges: int) -> bool:
    return False


def _refuse(leaf: torch.Tensor, gradient: torch.Tensor, owned: bool) -> None:
    raise RuntimeError("only the native allocator accumulates gradients, and there is none")


def _cannot_tell(tensor: torch.Tensor) -> bool:
    return True


_BY_AUTOGRAD = Accumulation(_accumulates_never, _refuse, torch_compat.storage_key, _cannot_tell)
