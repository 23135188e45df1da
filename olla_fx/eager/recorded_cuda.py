"""What eager PyTorch really takes of a GPU for a step: the yardstick of every plan on CUDA.

Two figures of the caching allocator: the most bytes that tensors had at once, and the most that it held of
the device for them. What it held and no tensor used, at the moment when it took the last of it, is
fragmentation (OLLA §5.4). Parameters, state and inputs are in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from olla_fx import torch_compat
from olla_fx.errors import DeviceError

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How a process is given its allocator's settings; read by torch when it starts."""


@dataclass(frozen=True, slots=True)
class CudaBaseline:
    """What a step took of a CUDA device, everything that was there before included.

    Attributes:
        max_allocated_bytes: most bytes that tensors had at once.
        max_reserved_bytes: most bytes that the allocator held.
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
        DeviceError: when there is no such device.
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
    settings = next((os.environ[each] for each in SETTINGS_VARIABLES if os.environ.get(each)), "")
    return CudaBaseline(
        allocated_bytes, reserved_bytes, unused_bytes / reserved_bytes if reserved_bytes else 0.0, settings
    )


def resident_at_peak(
    history: Iterable[tuple[str, int]], allocated_bytes: int, reserved_bytes: int
) -> int | None:
    """What tensors had when the allocator first held as much as it ever did.

    Args:
        history: actions of the caching allocator and their bytes.
        allocated_bytes: what tensors had before.
        reserved_bytes: what the allocator held before.

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
