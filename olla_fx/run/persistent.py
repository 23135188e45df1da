"""Memory that CUDA's libraries keep for good, allocated before a planned region.

cuBLAS and cuBLASLt get a workspace for each thread and stream at their first product there, and keep it. In a
region that request would be taken for one of the operator's; it would not come again in the next step.
"""

from __future__ import annotations

import threading

import torch

_prepared = threading.local()


def allocate_library_workspaces(device: torch.device) -> None:
    """Let the libraries allocate what this thread and stream has not got yet; does nothing later on.

    Args:
        device: where a region is to run; nothing is to be done outside of CUDA.
    """
    if device.type != "cuda":
        return
    where = device, torch.cuda.current_stream(device).cuda_stream
    seen: set[tuple[torch.device, int]] = _prepared.__dict__.setdefault("seen", set())
    if where in seen:
        return
    seen.add(where)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        square = torch.zeros(16, 16, device=device)
        # A plain product takes cuBLAS, one with a bias cuBLASLt.
        torch.mm(square, square)
        torch.addmm(square[0], square, square)
