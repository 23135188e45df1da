"""Allocates the memory that CUDA's libraries keep for good, before a planned region.

cuBLAS and cuBLASLt get a workspace for each thread and stream at their first product there, and keep it. In a
region that request would be taken for one of the operator's; it would not come again in the next step.
"""

from __future__ import annotations

import threading

import torch

_prepared = threading.local()


def allocate_library_workspaces(device: torch.device) -> None:
    """Let the libraries allocate the workspaces of this thread and stream, once.

    Args:
        device: that a region is to run on; without CUDA nothing is done.
    """
    if device.type != "cuda":
        return
    key = device, torch.cuda.current_stream(device).cuda_stream
    seen: set[tuple[torch.device, int]] = _prepared.__dict__.setdefault("seen", set())
    if key in seen:
        return
    seen.add(key)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        square = torch.zeros(16, 16, device=device)
        # A plain product takes cuBLAS, one with a bias cuBLASLt.
        torch.mm(square, square)
        torch.addmm(square[0], square, square)
