"""What eager PyTorch really takes of a GPU for a step: the yardstick of every plan on CUDA.

Two figures of the caching allocator: the most bytes that tensors had at once, and the most that it held of
the device for them. What it held and no tensor used is fragmentation (OLLA §5.4). Parameters, state and
inputs are in both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from olla_fx.errors import DeviceError

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How a process is given its allocator's settings; read by torch when it starts."""


@dataclass(frozen=True, slots=True)
class CudaBaseline:
    """What a step took of a CUDA device, everything that was there before included.

    Attributes:
        max_allocated_bytes: most bytes that tensors had at once.
        max_reserved_bytes: most bytes that the allocator held.
        fragmentation: share of the latter that the former leaves unused, 0 to 1.
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
    results = step()
    torch.cuda.synchronize(device)
    del results
    allocated_bytes = torch.cuda.max_memory_allocated(device)
    reserved_bytes = torch.cuda.max_memory_reserved(device)
    unused_bytes = reserved_bytes - allocated_bytes
    settings = next((os.environ[each] for each in SETTINGS_VARIABLES if os.environ.get(each)), "")
    return CudaBaseline(
        allocated_bytes, reserved_bytes, unused_bytes / reserved_bytes if reserved_bytes else 0.0, settings
    )
