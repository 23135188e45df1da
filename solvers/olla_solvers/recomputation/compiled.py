"""Compiles walks and the annealing by numba where that is installed and pays.

Compilation takes some ten seconds once on a machine, and half a second to load after that; then a walk is
some fifty times faster than in plain Python.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from olla_solvers.recomputation import walk
from olla_solvers.recomputation.anneal import anneal
from olla_solvers.recomputation.instance import Flat


def is_available() -> bool:
    """Return True if numba is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def compiled_anneal() -> Callable[..., float]:
    """Return :func:`olla_solvers.recomputation.anneal.anneal`, compiled when it is first called."""
    from numba import njit

    _register()
    compiled: Callable[..., float] = njit(cache=True)(anneal)
    return compiled


@cache
def compiled_walk() -> Callable[..., tuple[int, int, float]]:
    """Return :func:`olla_solvers.recomputation.walk.walk`, compiled when it is first called."""
    from numba import njit

    _register()
    compiled: Callable[..., tuple[int, int, float]] = njit(cache=True)(walk.walk)
    return compiled


@cache
def _register() -> None:
    """Let numba compile the functions of a walk where others call them."""
    from numba.extending import register_jitable

    for function in (walk.walk, walk.excess, *walk.PARTS):
        register_jitable(function)


def as_arrays(lists: Any) -> Any:
    """Return a flat step or a trace with arrays of numpy in place of its lists."""
    floats = {"unit_seconds"} if isinstance(lists, Flat) else set()
    return type(lists)(
        *(
            np.array(numbers, dtype=np.float64 if name in floats else np.int64)
            for name, numbers in lists._asdict().items()
        )
    )
