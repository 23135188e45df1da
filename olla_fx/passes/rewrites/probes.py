"""Asks a device's kernels, with random numbers, whether a rewrite has equal bits there.

Libraries of matrix products choose kernels by shape, type and device, and are free to sum up in another
sequence for a part of a matrix than for all of it. No rule says when they do, so the very product is computed
both ways, once a machine, and the answer is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

_SEED = 0x0117A


Remember: TypeAlias = Callable[[dict[str, Any], Callable[[], bool]], bool]
"""Gives the answer that is known for a question, or what a function answers, and keeps that."""


@dataclass(frozen=True)
class Probe:
    """Answers about the kernels of a device.

    Attributes:
        device: the device on which the step is to run.
        runs: False if nothing may run: then what was not asked before is taken to be equal.
        remember: keeps answers.
    """

    device: torch.device
    runs: bool
    remember: Remember

    def equal_in_blocks(self, left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
        """Return True if a matrix product in blocks of rows has the bits of the whole one.

        Args:
            left: of the product's layout and type; its values are not read.
            right: likewise.
            rows: of a block.
        """
        question = {
            "product in blocks": rows,
            "left": _layout(left),
            "right": _layout(right),
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
            "oneDNN": torch.backends.mkldnn.enabled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        if not self.runs:
            return True
        return self.remember(question, partial(self._product_is_equal, left, right, rows))

    def _product_is_equal(self, left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
        return _is_equal_in_blocks(self._random(left), self._random(right), rows)

    def _random(self, fake: torch.Tensor) -> torch.Tensor:
        """Return random numbers in a fake tensor's layout, some of them 0."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        # Elements of an expanded tensor lie in one place.
        pairs = zip(fake.shape, fake.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in pairs)
        memory = torch.empty(count, dtype=fake.dtype, device=self.device).normal_(generator=generator)
        return memory.mul_(memory.abs() > 0.1).as_strided(fake.shape, fake.stride())


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), str(tensor.dtype)


def _is_equal_in_blocks(left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
    """Compare a product with its blocks, bit by bit."""
    with torch.no_grad(), torch.autocast(left.device.type, enabled=False):
        whole = left @ right
        starts = range(0, left.shape[0], rows)
        return all(_same_bits(left[at : at + rows] @ right, whole[at : at + rows]) for at in starts)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other) and torch.equal(one.signbit(), other.signbit()))
