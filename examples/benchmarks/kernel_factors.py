"""Says how many times as long kernels take as it takes to move what they read and write.

For operators that training steps rarely meet, so that ``operator_costs.py`` tells nothing of them: one
thread, its processor time, the best of some runs on two million numbers. The factors beyond 1.8 are those of
:mod:`olla_fx.costs.profiles`.

    python examples/benchmarks/kernel_factors.py
    python examples/benchmarks/kernel_factors.py --functions mish sort
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ordering import table
from torch.utils import _pytree as pytree

from olla_fx.costs import PROFILES

RUNS = 5
ROWS, COLUMNS = 1024, 2048

NUMBERS = (
    "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "sin", "cos", "tan", "atan", "sinh", "cosh",
    "erf", "log1p", "expm1", "lgamma", "digamma", "isnan",
)  # fmt: skip
ACTIVATIONS = ("gelu", "silu", "mish", "softplus", "elu", "leaky_relu", "hardswish", "logsigmoid")
ROWS_OF_NUMBERS = (
    "sum", "mean", "amax", "max", "min", "argmax", "var", "std", "prod", "logsumexp", "logcumsumexp",
    "cumsum", "cumprod", "softmax", "log_softmax", "sort", "median",
)  # fmt: skip
PAIRS = ("atan2", "logaddexp", "fmod", "remainder", "maximum")


def functions() -> dict[str, Callable[[], Any]]:
    """Return what is run, by name."""
    x, y = torch.randn(2, ROWS, COLUMNS)
    positive, images = x.abs() + 0.5, torch.randn(8, 64, 64, 64)
    calls: dict[str, Callable[[], Any]] = {}
    for name in NUMBERS:
        calls[name] = lambda name=name: getattr(torch, name)(positive)
    for name in ACTIVATIONS:
        calls[name] = lambda name=name: getattr(F, name)(x)
    for name in ROWS_OF_NUMBERS:
        calls[name] = lambda name=name: getattr(torch, name)(x, 1)
    for name in PAIRS:
        calls[name] = lambda name=name: getattr(torch, name)(x, y)
    calls["erfinv"] = lambda: x.tanh().erfinv()
    calls["special.i0e"] = lambda: torch.special.i0e(x)
    calls["topk"] = lambda: x.topk(64, 1)
    for mode in ("bilinear", "bicubic"):
        calls[f"upsample, {mode}"] = lambda mode=mode: F.interpolate(images, scale_factor=2, mode=mode)
    calls["unfold"] = lambda: F.unfold(images, 3)
    calls["max_pool2d"] = lambda: F.max_pool2d(images, 3, 2, 1, return_indices=True)
    return calls


def factor(call: Callable[[], Any], moved_bytes: int) -> float:
    """Return the processor time of a call beside that of moving so many bytes."""
    seconds = []
    for _ in range(RUNS):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return min(seconds) * PROFILES["cpu"].bandwidth / moved_bytes


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calls = functions()
    parser.add_argument("--functions", nargs="+", choices=calls, default=list(calls), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    argument_bytes = 4 * ROWS * COLUMNS
    rows = []
    for name in options.functions:
        results = [leaf for leaf in pytree.tree_leaves(calls[name]()) if isinstance(leaf, torch.Tensor)]
        read = 2 * argument_bytes if name in PAIRS else argument_bytes
        moved_bytes = read + sum(result.numel() * result.element_size() for result in results)
        rows.append((factor(calls[name], moved_bytes), name))
    print(table(("function", "factor"), [(name, f"{times:.1f}") for times, name in sorted(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
