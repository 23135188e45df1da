"""Adds gradients to ``.grad`` in autograd's place; see ``csrc/accumulation.h``."""

from __future__ import annotations

import torch

from olla_fx import torch_compat
from olla_fx.arena.native import native_module


def accumulates_alone(leaf: torch.Tensor, edges: int, device: torch.device) -> bool:
    """Return True if the backward under way may add its gradient to a tensor's ``.grad`` itself.

    Args:
        leaf: what the gradient is for; False for a tensor that is no leaf.
        edges: how many edges lead to it as far as the caller knows, over one of which something comes.
        device: whose native allocator to ask.
    """
    native = native_module(device.type)
    return native is not None and native.accumulates_alone(leaf, edges)


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor, owned: bool, device: torch.device) -> None:
    """Add a gradient to a leaf's ``.grad``, as autograd does, or make it that.

    Args:
        leaf: one that :func:`accumulates_alone`.
        gradient: in planned code; what is allocated for it is not counted there.
        owned: True if nobody else uses the gradient's memory, so that it may become ``.grad`` itself.
        device: whose native allocator to ask.
    """
    native = native_module(device.type)
    if native is None:
        raise RuntimeError("gradients are accumulated by the native allocator, which is gone")
    native.accumulate(leaf, gradient, owned)


def shares_storage(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if other tensors look into a tensor's memory, or nobody can tell.

    Args:
        tensor: any.
        device: whose native allocator to ask.
    """
    native = native_module(device.type)
    return native is None or native.shares_storage(tensor)


def storage_address(tensor: torch.Tensor, device: torch.device) -> int:
    """Return what tells a tensor's storage apart from others that exist.

    Without asking Python for the storage: its object would count as another user of it, see
    :func:`shares_storage`.

    Args:
        tensor: any.
        device: whose native allocator to ask.
    """
    native = native_module(device.type)
    return torch_compat.storage_key(tensor) if native is None else native.storage_address(tensor)
