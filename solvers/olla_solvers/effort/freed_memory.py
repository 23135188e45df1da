"""Returns to the system what planning has freed.

Planning a step of thousands of operators allocates and frees tens of megabytes in small blocks. glibc keeps
pages of which every block is free if a used one lies behind them, so that the process stays larger by nearly
all of it; asked to, it returns them.
"""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return pages without a used block to the system, where the C library can be asked to."""
    if sys.platform.startswith("linux"):
        # Other C libraries than glibc have no such function, and return memory by themselves.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
