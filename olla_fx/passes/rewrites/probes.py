"""Asks a device's kernels, with random numbers, whether a rewrite has equal bits there.

Libraries of matrix products choose kernels by shape, type and device, and are free to sum up in another
sequence for a part of a matrix than for all of it. No rule says when they do, so the very product is computed
both ways, once a machine, and the answer is kept on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from olla_fx.kernels import cpu_kernels
from olla_fx.normalization import batch_norm_again

aten = torch.ops.aten

_SEED = 0x0117A

FEW = 2
"""Images of a batch whose normalisation is compared: the kernels go through one after the other alike."""


Remember: TypeAlias = Callable[[dict[str, Any], Callable[[], bool]], bool]
"""Gives the answer that is known for a question, or what a function answers, and keeps that."""


@dataclass(frozen=True)
class Probe:
    """Answers about the kernels of a device.

    Attributes:
        device: the device on which the step is to run.
        runs: False if nothing may run: then what was not asked before is taken to be equal.
        remember: keeps answers.
        sets_states: True if operators may set the state of a random generator, which a CUDA graph cannot.
    """

    device: torch.device
    runs: bool
    remember: Remember
    sets_states: bool = True

    def equal_in_blocks(self, left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
        """Return True if a matrix product in blocks of rows has the bits of the whole one.

        Args:
            left: of the product's layout and type; its values are not read.
            right: likewise.
            rows: of a block.
        """
        question = {"product in blocks": rows, "left": layout(left), "right": layout(right)}
        return self.agrees(question, partial(self._product_is_equal, left, right, rows))

    def agrees(self, question: Mapping[str, Any], ask: Callable[[], bool]) -> bool:
        """Return True if kernels agree.

        Args:
            question: what they are asked, as JSON can write it.
            ask: finds it out.
        """
        settings = {
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
            "oneDNN": torch.backends.mkldnn.enabled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        return not self.runs or self.remember({**question, **settings}, ask)

    def equal_from_statistics(self, source: torch.Tensor) -> bool:
        """Return True if a batch norm made again from its statistics has the bits of the first run.

        Args:
            source: of the layout and type of its input; its values are not read.
        """
        if not self.runs:
            return True
        images = source[:FEW]
        question = {"batch norm from statistics": layout(images)}
        return cpu_kernels() is not None and self.agrees(question, lambda: self._is_made_again(images))

    def equal_without_statistics(self, source: torch.Tensor) -> bool:
        """Return True if a batch norm without running statistics has the bits of one that updates them.

        Args:
            source: of the layout and type of its input; its values are not read.
        """
        images = source[:FEW]
        question = {"batch norm without statistics": layout(images)}
        return self.agrees(question, lambda: self._is_normalized_alike(images))

    def _is_made_again(self, images: torch.Tensor) -> bool:
        x, (weight, bias) = self.random(images), self._affine(images)
        with torch.no_grad():
            first, mean, inverse = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
            again = batch_norm_again(x, weight, bias, mean, inverse, -math.inf, math.inf)
        return same_bits(first, again)

    def _is_normalized_alike(self, images: torch.Tensor) -> bool:
        x, (weight, bias), running = self.random(images), self._affine(images), self._affine(images)
        with torch.no_grad():
            first = aten._native_batch_norm_legit(x, weight, bias, *running, True, 0.1, 1e-5)
            again = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        return all(map(same_bits, first, again))

    def _affine(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return two arrays of random numbers, one for each channel."""
        return self.random(torch.empty(2, images.shape[1], dtype=images.dtype, device="meta")).unbind()

    def _product_is_equal(self, left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
        return _is_equal_in_blocks(self.random(left), self.random(right), rows)

    def random(self, fake: torch.Tensor) -> torch.Tensor:
        """Return random numbers in a fake tensor's layout, some of them 0."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        # Elements of an expanded tensor lie in one place.
        pairs = zip(fake.shape, fake.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in pairs)
        memory = torch.empty(count, dtype=fake.dtype, device=self.device).normal_(generator=generator)
        return memory.mul_(memory.abs() > 0.1).as_strided(fake.shape, fake.stride())


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what kernels are chosen by, as JSON can write it."""
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), str(tensor.dtype)


def _is_equal_in_blocks(left: torch.Tensor, right: torch.Tensor, rows: int) -> bool:
    """Compare a product with its blocks, bit by bit."""
    with torch.no_grad(), torch.autocast(left.device.type, enabled=False):
        whole = left @ right
        starts = range(0, left.shape[0], rows)
        return all(same_bits(left[at : at + rows] @ right, whole[at : at + rows]) for at in starts)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same numbers, signs of zeros included."""
    return bool(torch.equal(one, other) and torch.equal(one.signbit(), other.signbit()))
