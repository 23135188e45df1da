"""Chooses kernels of convolutions with symbolic sizes without asking for more than they depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from olla_fx.torch_compat.patches import PATCHING

_MANY = 16
"""A batch of which oneDNN takes every convolution."""


@contextlib.contextmanager
def convolutions_of_any_batch() -> Iterator[None]:
    """Let the kernel of a convolution be chosen without a look at its batch where that decides nothing.

    On the CPU oneDNN leaves filters of one element to another kernel in batches below 16. PyTorch asks for
    the batch first and for the filter afterwards, so that for every convolution a symbolic batch would be one
    below 16, or one from 16 on.
    """
    with PATCHING:
        original: Any = torch._C._select_conv_backend

        def select(features: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            batch: Any = features.shape[0]
            if isinstance(batch, torch.SymInt) and features.dim() == weight.dim() == 4 and batch > 1:
                decides = weight.shape[-1] == weight.shape[-2] == 1 and torch.get_num_threads() == 1
                if features.device.type == "cpu" and not decides:
                    many = features.new_empty_strided((_MANY, *features.shape[1:]), features.stride())
                    backend = original(many, weight, *args, **kwargs)
                    if backend == torch._C._ConvBackend.Mkldnn:  # type: ignore[attr-defined]
                        return backend
            return original(features, weight, *args, **kwargs)

        torch._C._select_conv_backend = select
        try:
            yield
        finally:
            torch._C._select_conv_backend = original
