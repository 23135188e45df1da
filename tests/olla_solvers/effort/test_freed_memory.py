"""Tests of what is freed after planning."""

from __future__ import annotations

import gc
import weakref

from olla_solvers.effort.freed_memory import garbage_collected


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        """Refer to itself."""
        self.itself = self


def test_garbage_is_freed_at_the_end() -> None:
    before, survives = Cycle(), Cycle()
    older = weakref.ref(before)
    del before
    with garbage_collected():
        garbage = weakref.ref(Cycle())
        with garbage_collected():
            inner = weakref.ref(Cycle())
        assert gc.get_freeze_count()
    assert garbage() is None
    assert inner() is None
    assert survives.itself is survives
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert older() is None


def test_what_the_program_has_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        with garbage_collected():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
