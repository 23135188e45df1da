"""Compiles walks and the annealing by numba where that is installed and pays.

Compilation takes some ten seconds once on a machine, and half a second to load after that; then a walk is
some fifty times faster than in plain Python. It belongs into a process of its own, since numba and what it
compiles stay in memory.

numba keeps what it has compiled beside the source or in the user's cache folder (or in that of the
environment variable ``NUMBA_CACHE_DIR``). Where it can write to none of them, nothing is compiled. It looks
for changes in the files of :func:`walk` and :func:`anneal` alone: whoever edits what these call in another
file, or the options here, must remove what was kept.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from olla_solvers.recomputation import walk
from olla_solvers.recomputation.anneal import anneal, copy
from olla_solvers.recomputation.instance import Flat

_LOGGER = logging.getLogger(__name__)

COMPILATION_SECONDS = 30.0
"""That must be left for what was not compiled on this machine before, which cannot be interrupted."""

OPTIONS: dict[str, Any] = {"_nrt": False}
"""For numba: counting references to arrays would take 95 % of a walk; compiled code allocates nothing."""


def is_available() -> bool:
    """Return True if numba is installed."""
    return importlib.util.find_spec("numba") is not None


def is_ready(deadline: float) -> bool:
    """Return True if walks and annealing are compiled, or can be and kept, until a deadline.

    Args:
        deadline: on the monotonic clock.
    """
    if not is_available():
        return False
    try:
        functions = (compiled_walk(), compiled_anneal())
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _LOGGER.info("no folder keeps compiled walks; set NUMBA_CACHE_DIR to one (%s)", error)
        return False
    is_kept = all(any(_kept_files(function)) for function in functions)
    return is_kept or deadline - time.monotonic() > COMPILATION_SECONDS


def _kept_files(function: Any) -> Iterator[Path]:
    """Go through the files of what was compiled of a function, in this version of Python."""
    place = function.py_func.__code__.co_firstlineno
    return Path(function.stats.cache_path).glob(f"*.{function.__name__}-{place}.*.nbc")


@cache
def compiled_anneal() -> Callable[..., float]:
    """Return :func:`olla_solvers.recomputation.anneal.anneal`, compiled when it is first called."""
    from numba import njit

    _register()
    compiled: Callable[..., float] = njit(cache=True, **OPTIONS)(anneal)
    return compiled


@cache
def compiled_walk() -> Callable[..., tuple[int, int, float]]:
    """Return :func:`olla_solvers.recomputation.walk.walk`, compiled when it is first called."""
    from numba import njit

    _register()
    compiled: Callable[..., tuple[int, int, float]] = njit(cache=True, **OPTIONS)(walk.walk)
    return compiled


@cache
def _register() -> None:
    """Let numba compile the functions of a walk where others call them."""
    from numba.extending import register_jitable

    for function in (walk.walk, walk.excess, *walk.PARTS, copy):
        register_jitable(**OPTIONS, forceinline=True)(function)


def as_arrays(lists: Any) -> Any:
    """Return a flat step or a trace with arrays of numpy in place of its lists."""
    floats = {"unit_seconds"} if isinstance(lists, Flat) else set()
    return type(lists)(
        *(
            np.array(numbers, dtype=np.float64 if name in floats else np.int64)
            for name, numbers in lists._asdict().items()
        )
    )
