"""Finds a sequence of units of which every possible repetition before one operator is a part.

Before a late operator, the evaluator makes dropped units again depth first; which ones, and so in which
sequence, depends on what is there. The integer program needs one sequence of slots in advance, each of which
is used or not, that contains all of these.

Units without memory of what was visited, a depth-first walk lists a unit at each path that leads to it. That
is such a sequence, but long. Two rules take out what is never used. Let a walk come to a unit u over the path
p (a set of units that are all not there), and find it missing:

1. If u has a slot at a path within p, it was made there at the latest: u is not missing.
2. Let every slot since a place i belong to u, to a unit that reads u, or to a path with one of these that is
   not on p. Had one of them been used, then the unit concerned is done, with all that it reads, which is u.
   So none was used, and what is made for u now may use slots from i on, if they hold it in sequence.

A slot that stands for several paths keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from olla_solvers.recomputation.units import Unit

MOST_VISITS = 2_000
"""Of the walk; the program would be too large by far."""

LONGEST_PATH = 300
"""The same."""

MOST_SLOTS_A_UNIT = 3
"""On average; more are taken for a sign of the number of paths."""


class TooManySlotsError(Exception):
    """Raised where there are too many paths to list; never leaves this package."""


def slots_for(
    wanted: Iterable[Unit], reads: Sequence[Sequence[Unit]], may_run: Callable[[Unit], bool]
) -> list[Unit]:
    """Return a sequence that contains each one in which missing units can be made.

    Args:
        wanted: units to make, in sequence.
        reads: for each unit those that it reads, in the sequence in which they are made.
        may_run: False for units that cannot run here; they are there.

    Raises:
        TooManySlotsError: if there are too many paths, or too long ones.
    """
    walk = _Walk(reads, may_run)
    for unit in wanted:
        walk.visit(unit, frozenset())
    if len(walk.slots) > MOST_SLOTS_A_UNIT * len(set(walk.slots)):
        raise TooManySlotsError
    return walk.slots


class _Walk:
    def __init__(self, reads: Sequence[Sequence[Unit]], may_run: Callable[[Unit], bool]) -> None:
        self.slots: list[Unit] = []
        self._paths: list[list[frozenset[Unit]]] = []
        self._all_paths: dict[Unit, list[frozenset[Unit]]] = {}
        self._reads = reads
        self._may_run = may_run
        self._visits = 0

    def visit(self, unit: Unit, path: frozenset[Unit]) -> None:
        """Add the slots in which a unit that is reached over a path is made, after all that it reads."""
        self._visits += 1
        if self._visits > MOST_VISITS or len(path) > LONGEST_PATH:
            raise TooManySlotsError
        known = self._all_paths.setdefault(unit, [])
        if not self._may_run(unit) or any(earlier <= path for earlier in known):
            return
        first = len(self.slots)
        for read in self._reads[unit]:
            self.visit(read, path | {unit})
        self.slots.append(unit)
        self._paths.append([path])
        known.append(path)
        self._reuse(unit, path, first)

    def _reuse(self, unit: Unit, path: frozenset[Unit], first: int) -> None:
        """Take out the slots from the first one on if earlier ones can stand for them."""
        begin = first
        while begin > 0 and all(
            any(
                other_unit == unit or unit in self._reads[other_unit]
                for other_unit in {self.slots[begin - 1]} | (other - path)
            )
            for other in self._paths[begin - 1]
        ):
            begin -= 1
        places, place = [], begin
        for slot in self.slots[first:]:
            while place < first and self.slots[place] != slot:
                place += 1
            if place == first:
                return
            places.append(place)
            place += 1
        for place, paths in zip(places, self._paths[first:], strict=True):
            self._paths[place] += paths
        del self.slots[first:], self._paths[first:]
