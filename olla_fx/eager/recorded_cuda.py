"""Measures the memory that eager PyTorch takes of a GPU for a step: the baseline of every plan on CUDA.

Two figures come from the caching allocator: the maximum of bytes in tensors, and of bytes that it reserved.
The share of the latter that no tensor used when it reached its maximum is fragmentation (OLLA §5.4).
Parameters, state and inputs count in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from olla_fx import torch_compat
from olla_fx.errors import DeviceError

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator's settings, read by torch when it starts."""


@dataclass(frozen=True, slots=True)
class CudaBaseline:
    """The memory that a step took of a CUDA device, what was allocated before it included.

    Attributes:
        max_allocated_bytes: the maximum of bytes in tensors.
        max_reserved_bytes: the maximum of bytes that the allocator reserved.
        fragmentation: share of the latter that no tensor used when it reached its peak, 0 to 1.
        allocator_settings: of the caching allocator, as the environment gives them; empty for its defaults.
    """

    max_allocated_bytes: int
    max_reserved_bytes: int
    fragmentation: float
    allocator_settings: str


def measure_cuda_baseline(
    step: Callable[[], object], device: torch.device, *, warm_ups: int = 2
) -> CudaBaseline:
    """Run a step on a GPU and read what it took.

    Args:
        step: runs one step; called ``warm_ups + 1`` times.
        device: a CUDA device.
        warm_ups: steps before the one that is measured: optimizers make their state in the first, libraries
            their workspaces.

    Raises:
        DeviceError: if there is no such device.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"{device} is no CUDA device that torch {torch.__version__} can use here")
    for _ in range(warm_ups):
        step()
    torch.cuda.synchronize(device)
    # What earlier steps left in the cache is not this one's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    results, history = torch_compat.with_allocator_history(step, device)
    del results
    allocated_bytes = torch.cuda.max_memory_allocated(device)
    reserved_bytes = torch.cuda.max_memory_reserved(device)
    resident_bytes = resident_at_peak(history, *before)
    unused_bytes = reserved_bytes - (allocated_bytes if resident_bytes is None else resident_bytes)
    settings = next((os.environ[name] for name in SETTINGS_VARIABLES if os.environ.get(name)), "")
    return CudaBaseline(
        allocated_bytes, reserved_bytes, unused_bytes / reserved_bytes if reserved_bytes else 0.0, settings
    )


def resident_at_peak(
    history: Iterable[tuple[str, int]], allocated_bytes: int, reserved_bytes: int
) -> int | None:
    """Return the bytes of tensors when the allocator first reserved its maximum.

    Args:
        history: actions of the caching allocator and their bytes.
        allocated_bytes: of tensors, before.
        reserved_bytes: of the allocator, before.

    Returns:
        The bytes, those of the request included for which the allocator grew; None if it never did.
    """
    resident_bytes = None
    peak_bytes, has_grown = reserved_bytes, False
    for action, size_bytes in history:
        if action in ("segment_alloc", "segment_map"):
            reserved_bytes += size_bytes
            has_grown = has_grown or reserved_bytes > peak_bytes
            peak_bytes = max(peak_bytes, reserved_bytes)
        elif action in ("segment_free", "segment_unmap"):
            reserved_bytes -= size_bytes
        elif action == "free_requested":
            allocated_bytes -= size_bytes
        elif action == "alloc":
            allocated_bytes += size_bytes
            if has_grown:
                resident_bytes, has_grown = allocated_bytes, False
    return resident_bytes
