"""The operators by which an array waits in host memory: out and in, each with a beginning and a wait.

``offload`` begins to copy a whole storage to the host and returns the bytes there; after ``offload_wait`` the
array's own memory is free. ``reload`` makes a new array and begins to copy the bytes into it; after
``reload_wait`` it can be used. The wait of a copy reads both sides, so that neither is freed before.

PyTorch has operators for the same (``ao::offload``, ``ao::reload``, ``ao::wait_tensor``, 2.11). They are not
used: their host memory is allocated at each copy, at no planned place; both directions share a stream; a
wait empties the storage of its source, of which a planned buffer would not know; and they need a device with
streams, so that nothing of it would run on a CPU.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from olla_fx.link.session import current_session
from olla_fx.operators import define_new


def _offload(array: torch.Tensor, transfer: int) -> torch.Tensor:
    return current_session().offload(transfer, array)


def _fake_offload(array: torch.Tensor, transfer: int) -> torch.Tensor:
    return torch.empty(array.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")


def _offload_wait(host: torch.Tensor, array: torch.Tensor, transfer: int) -> None:
    current_session().wait_out(transfer)


def _reload(host: torch.Tensor, transfer: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    array = _fake_reload(host, transfer, dtype, device)
    current_session().reload(transfer, host, array)
    return array


def _fake_reload(host: torch.Tensor, transfer: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(host.numel() // dtype.itemsize, dtype=dtype, device=device)


def _reload_wait(array: torch.Tensor, host: torch.Tensor, transfer: int) -> None:
    current_session().wait_in(transfer)


def _no_result(*_: object) -> None:
    return None


offload = define_new("offload", "(Tensor array, int transfer) -> Tensor", _offload, _fake_offload)
"""Begins to copy the storage of an array to its planned place on the host."""

offload_wait = define_new(
    "offload_wait", "(Tensor host, Tensor array, int transfer) -> ()", _offload_wait, _no_result
)
"""Waits until an array has been copied to the host."""

reload = define_new(
    "reload",
    "(Tensor host, int transfer, ScalarType dtype, Device device) -> Tensor",
    _reload,
    _fake_reload,
)
"""Makes an array, flat, and begins to copy into it what waits on the host."""

reload_wait = define_new(
    "reload_wait", "(Tensor array, Tensor host, int transfer) -> ()", _reload_wait, _no_result
)
"""Waits until an array has been copied from the host."""

_TRANSFERS = frozenset({offload, offload_wait, reload, reload_wait})
_WAITS = frozenset({offload_wait, reload_wait})


def is_transfer(node: fx.Node) -> bool:
    """Return True if a node begins or ends a copy between device and host."""
    return node.target in _TRANSFERS


def waits_for(node: fx.Node) -> fx.Node | None:
    """Return the node that begins the copy which a node waits for; None if it waits for none."""
    return cast(fx.Node, node.args[0]) if node.target in _WAITS else None
