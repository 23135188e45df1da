"""Kernels of our own, in C++: for the CPU, built like the arenas when first needed.

Where they cannot be built, there is no buffer either, and what would use them is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

from olla_fx.arena import build, native_module

Dimension: TypeAlias = tuple[int, int, int, int, int, int]
"""Of a pooling: sizes of what is pooled and of a window, step, padding, dilation, number of maxima."""


class CpuKernels(Protocol):
    """The exports of ``cpu_kernels.cpp``. Tensors are addresses; those of numbers are dense."""

    def max_pool(
        self,
        dimensions: Sequence[Dimension],
        inner: int,
        bits: int,
        planes: int,
        source: int,
        maxima: int,
        packed: int,
        is_double: bool,
    ) -> None:
        """Pool planes; see ``pooling.h``."""

    def max_pool_backward(
        self,
        dimensions: Sequence[Dimension],
        inner: int,
        bits: int,
        planes: int,
        gradient: int,
        packed: int,
        result: int,
        is_double: bool,
    ) -> None:
        """Spread gradients of maxima."""

    def normalize_again(
        self,
        planes: int,
        channels: int,
        inner: int,
        channels_last: bool,
        weight: int,
        bias: int,
        mean: int,
        inverse: int,
        least: float,
        most: float,
        source: int,
        result: int,
    ) -> None:
        """Normalise by channels, and clamp; see ``normalization.h``."""

    def compare(self, source: int, threshold: float, packed: int, count: int) -> None:
        """Set the bits of floats up to a threshold; see ``masks.h``."""

    def fill(self, source: int, packed: int, result: int, count: int) -> None:
        """Take floats, and 0 where a bit is set."""

    def pack(self, mask: int, packed: int, count: int) -> None:
        """Set the bits of truth values."""

    def scale(self, source: int, packed: int, factor: float, result: int, count: int) -> None:
        """Scale floats whose bit is set."""


_THREADED = ("-fopenmp",) if sys.platform == "linux" else ()
_LIBRARY = build.Library(
    "olla_fx_cpu_kernels",
    "cpu_kernels.cpp",
    link_flags=_THREADED,
    # Without contraction, each product and each sum is rounded as it is written.
    compiler_flags=("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", *_THREADED),
    headers=("masks.h", "normalization.h", "pooling.h", "vectors.h"),
)
_lock = threading.Lock()
_built: list[CpuKernels | None] = []


def cpu_kernels() -> CpuKernels | None:
    """Return the kernels for the CPU, built on the first call; None where there is no native arena either."""
    with _lock:
        if not _built:
            _built.append(_build())
        return _built[0]


def _build() -> CpuKernels | None:
    if native_module("cpu") is None:
        return None
    try:
        return cast(CpuKernels, build.load(_LIBRARY))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return None
