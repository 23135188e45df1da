"""Rules by which the exact search leaves out placements: a switch each, with the proof that it loses nothing.

Words used in the proofs. A *solution* gives every array an offset within the capacity, aligned, without
collisions; a *smallest* one has the least sum of offsets among all solutions. In a smallest solution no array
can move to a lower free offset, so each lies at the lowest offset, aligned and clear of fixed blocks, that is
not below the tops of the arrays beneath it. Listing a smallest solution by ascending offset, ties in any
given order (the *rank*), and putting each array at the lowest offset that the listed ones allow (its *low*)
therefore rebuilds it. The search runs through such listings only: this *canonical order* is its frame, after
MiniMalloc (Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning",
ASPLOS 2023), and has no switch. A rule is right when it drops no listing of any smallest solution, or
drops one only where another solution stays. *Passed over* is an unplaced array whose (low, rank) is smaller
than that of the array placed last: in a listing it must rise before it is placed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple


class Switches(NamedTuple):
    """The rules that compiled code looks at; see :class:`SearchRules`."""

    dominance: bool
    section_floors: bool
    lift: bool
    local_dominance: bool
    identical: bool
    decompose: bool
    rerank: bool
    known_failures: bool


@dataclass(frozen=True, slots=True)
class SearchRules:
    """Which rules the search uses. The answer is the same with any of them off, only later.

    Attributes:
        maximal_sections: keep one section, that is a set of arrays alive together, for each run of births
            followed by a death, instead of one for each timestep with an event. *Proof:* the live set
            at any other time is a subset of a kept one, so two arrays meet in a kept section when they meet
            at all, and room in the kept sections leaves room in the others.
        dominance: skip a candidate whose low is at or above low + size of some unplaced array j of its
            component. *Proof:* all that is placed from there on lies at or above the candidate, so nothing
            but j ever occupies j's place at its low, which is free of what is placed already; j itself
            ends at or above the candidate and could move down there: not a smallest solution.
        section_floors: fail when in some section the lowest offset open to its unplaced arrays, plus their
            total size, plus what fixed blocks take above that offset, exceeds the capacity. *Proof:* those
            arrays and blocks are disjoint and lie between that offset and the capacity.
        lift: count no offset of a passed-over array as open below the lowest low + size of the arrays of
            its component that are not passed over. *Proof:* a passed-over array rises only when a neighbour
            is placed, and then to that one's top at least. The first of them to rise does so on an array
            that is not passed over, whose low never falls; any other rises on such a one or on one that rose.
            (That listings ascend says less: none of these tops is below the offset placed last.)
        local_dominance: fail when a passed-over array j has no unplaced neighbour k (alive together with it)
            whose low, or the offset placed last if that is higher, is below j's low + size. *Proof:* j
            ends above its low, so, as it cannot move there, some neighbour that is placed later
            occupies a part of [low, low + size): it starts below that end, and nowhere under its own low or
            the offset placed last.
        identical: of arrays with the same sections, size and alignment, place the one listed first
            before the next. *Proof:* swapping them in a solution yields a solution of the same sum.
        decompose: if no unplaced array crosses the border of two sections, search either side by itself;
            if one fails, so does the node. *Proof:* no array of one side constrains one of the
            other, and any part of a listing is in ascending order too.
        rerank: at a split order the arrays of a component anew, the tightest section first. *Proof:* ties are
            in any given order, so the only loss would be a component whose listing begins at the offset
            placed last; the rank of that array is therefore forgotten there, which only adds listings.
        known_failures: remember components that failed, and fail at once if one comes up again, in any
            order of trial. *Proof:* what is placed acts on a component through the lows of its arrays alone,
            so these decide what its part of a smallest solution may be. A node that failed shows that no such
            part begins at or above its first candidate (or just above that, where a passed-over array has the
            same low, whose listings it did not search). A node of the same lows whose first candidate is not
            below that has only parts of this kind. Arrays and lows are compared by two hashes of 64 bits; of
            a million components, two are taken for one with a chance below 10⁻²⁶.
    """

    maximal_sections: bool = True
    dominance: bool = True
    section_floors: bool = True
    lift: bool = True
    local_dominance: bool = True
    identical: bool = True
    decompose: bool = True
    rerank: bool = True
    known_failures: bool = True

    def switches(self) -> Switches:
        """Return the rules that compiled code looks at."""
        return Switches(*(bool(getattr(self, name)) for name in Switches._fields))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the rules' names, in the order of the class."""
        return tuple(field.name for field in fields(cls))
