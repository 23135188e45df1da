"""Takes the gradients of a planned backward, as emitted code hands them over.

The native allocator adds them to ``.grad`` in autograd's place where that changes nothing
(``csrc/gradients.h``, ``csrc/accumulation.h``); without it, autograd gets them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from olla_fx import torch_compat
from olla_fx.arena.native import LeftGradients, NativeModule, TakenGradients, native_module


def taken_gradients(
    native: NativeModule | None,
    leaves: Sequence[torch.Tensor],
    kept: Iterable[int],
    added: Iterable[int],
) -> TakenGradients:
    """Return what takes the gradients of a backward.

    Args:
        native: the native module of the step's device, if there is one.
        leaves: that want them.
        kept: positions of those that the plan keeps in the buffer.
        added: positions of those that it adds to ``.grad`` from there.
    """
    return _HandedOn(len(leaves)) if native is None else native.Gradients(leaves, kept, added)


class _HandedOn:
    """Gradients that autograd gets, all of them."""

    def __init__(self, count: int) -> None:
        self.left: LeftGradients | None = None
        self._absent: frozenset[int] = frozenset()
        self._gradients: list[torch.Tensor | None] = [None] * count
        self._storages: set[int] = set()

    def leave_out(self, positions: Iterable[int]) -> None:
        self._absent = frozenset(positions)

    def accumulate_directly(self, edges: Sequence[int]) -> None:
        pass

    def cut_edges(self) -> bool:
        return False

    def suited(self) -> tuple[list[int], list[int]] | None:
        return None

    def take(self, position: int, gradient: torch.Tensor, is_made_here: bool) -> None:
        if position in self._absent:
            return
        # Autograd may keep what it is given and add to it.
        if not is_made_here or torch_compat.storage_key(gradient) in self._storages:
            gradient = gradient.clone()
        self._storages.add(torch_compat.storage_key(gradient))
        self._gradients[position] = gradient

    def for_autograd(self) -> list[torch.Tensor | None]:
        return self._gradients


def shares_storage(tensor: torch.Tensor) -> bool:
    """Return True if other tensors look into a tensor's memory, or nobody can tell."""
    native = native_module(tensor.device.type)
    return native is None or native.shares_storage(tensor)
