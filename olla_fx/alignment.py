"""Sizes as a device's allocator counts them: rounded up to the boundary at which its blocks begin."""

from __future__ import annotations

import torch


def alignment_of(device: torch.device) -> int:
    """Return the boundary, in bytes, at multiples of which a device's blocks begin.

    PyTorch's kernels, oneDNN and cuDNN rely on what the device's stock allocator gives.
    """
    return 512 if device.type == "cuda" else 64


def rounded(size_bytes: int, alignment_bytes: int) -> int:
    """Round a size up to a multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes
