"""Frees what planning has left, and returns it to the system.

Graphs are full of cycles, which only the garbage collector frees. Python runs it over all objects when those
that survived have grown by a quarter, and in a process that has imported PyTorch that comes late: planning
would leave several megabytes of garbage. If what was there before is set aside, the same rule finds
the garbage of planning while it comes, and a collection takes a few milliseconds instead of 150.

Planning a step of thousands of operators allocates and frees tens of megabytes in small blocks. glibc keeps
pages of which every block is free if a used one lies behind them, so that the process stays larger by nearly
all of it; asked to, it returns them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_collected() -> Iterator[None]:
    """Free the garbage that is made while the context lasts, and look at no other objects for it.

    Objects that the program itself has set aside (``gc.freeze``) cannot be told from these afterwards, so
    that nothing happens if there are any; nor in a context within another.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def return_freed_memory() -> None:
    """Return pages without a used block to the system, where the C library can be asked to."""
    if sys.platform.startswith("linux"):
        # Other C libraries than glibc have no such function, and return memory by themselves.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
