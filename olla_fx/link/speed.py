"""How fast arrays are copied to the host and back: as the user says, or measured."""

from __future__ import annotations

import functools
import warnings

import torch

from olla_fx.errors import HostMemoryError, SwapError
from olla_fx.host_link import link_of
from olla_fx.link.host_memory import HostMemory
from olla_fx.options import Options
from olla_fx.swap_request import SwapRequest
from olla_solvers.swapping.transfers import Link

MEASURED_BYTES = 1 << 26
"""Copied each way to measure."""

COPIES = 3
"""Of which the fastest counts: the first one pays for what is set up."""


def link_for(options: Options, device: torch.device) -> Link | None:
    """Return the link over which a step's arrays may wait on the host; None if none may.

    Args:
        options: of the step.
        device: that it is for.

    Raises:
        SwapError: if swapping is asked for without a link where none can be measured.
        HostMemoryError: if swapping is asked for where there is no page-locked memory.
    """
    if isinstance(options.swap, SwapRequest):
        return options.swap.link
    if options.memory_budget is None or options.swap is False:
        return None
    if options.link is not None:
        return link_of(options.link)
    has_link = device.type == "cuda" and torch.cuda.is_available()
    if options.swap is True and not has_link:
        raise _without_link(device)
    # What is captured as a CUDA graph cannot swap.
    return _measured_of(options, device) if has_link and not options.cuda_graph else None


def _measured_of(options: Options, device: torch.device) -> Link | None:
    try:
        return _measured(torch.cuda.current_device() if device.index is None else device.index)
    except HostMemoryError as error:
        if options.swap is True:
            raise
        warnings.warn(f"nothing is swapped: {error}", RuntimeWarning, stacklevel=2)
        return None


def _without_link(device: torch.device) -> SwapError:
    return SwapError(
        f"swap=True on {device}: its memory is the host's own, or it is not here, so there is no link to "
        "measure. Leave swap out, or give link='16GB/s': of a device that is planned for, or to try swapping "
        "out by threads that copy so fast"
    )


@functools.lru_cache
def _measured(index: int) -> Link:
    """Return the link of a CUDA device."""
    device = torch.device("cuda", index)
    here = HostMemory(MEASURED_BYTES, device).take()
    there = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    return Link(_bytes_per_second(here, there), _bytes_per_second(there, here))


def _bytes_per_second(target: torch.Tensor, source: torch.Tensor) -> float:
    milliseconds = []
    for _ in range(COPIES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        milliseconds.append(float(began.elapsed_time(ended)))
    return MEASURED_BYTES / (min(milliseconds) / 1e3)
