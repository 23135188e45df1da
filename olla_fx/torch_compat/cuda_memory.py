"""Reads the history that PyTorch's caching allocator keeps for its memory snapshots."""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_allocator_history(
    step: Callable[[], object], device: torch.device
) -> tuple[object, list[tuple[str, int]]]:
    """Run a step and record the actions of a GPU's allocator.

    Args:
        step: called once.
        device: a CUDA device.

    Returns:
        What the step returned; and every action, such as ``alloc``, ``free_requested`` or ``segment_alloc``,
        with its bytes, in order.
    """
    memory = torch.cuda.memory
    index = torch.cuda.current_device() if device.index is None else device.index
    memory._record_memory_history("all", context=None, device=index, clear_history=True)
    try:
        results = step()
        torch.cuda.synchronize(device)
        entries = memory._snapshot(index)["device_traces"][index]
    finally:
        memory._record_memory_history(None, device=index)
    return results, [(entry["action"], int(entry["size"])) for entry in entries]
