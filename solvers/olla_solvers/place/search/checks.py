"""Compiled checks of what remains of a component: totals, open offsets, room in every section."""

from __future__ import annotations

from numba import njit

from olla_solvers.place.search.layout import Instance, Ints, State
from olla_solvers.place.search.rules import Switches


@njit(cache=True)
def sweep(instance: Instance, state: State, count: int, low: int, high: int) -> None:
    """Totals of the sections in ``[low, high)`` and how many arrays cross each boundary."""
    total, crossing, size, remaining = state.total, state.crossing, instance.size, state.remaining
    firsts, lasts = instance.first, instance.last
    total[low : high + 1] = 0
    crossing[low : high + 1] = 0
    for position in range(count):
        array = remaining[position]
        first, last = firsts[array], lasts[array]
        total[first] += size[array]
        total[last] -= size[array]
        crossing[first + 1] += 1
        crossing[last] -= 1
    for section in range(low + 1, high + 1):
        total[section] += total[section - 1]
        crossing[section] += crossing[section - 1]


@njit(cache=True)
def bottoms(instance: Instance, rules: Switches, state: State, count: int, floor: int, rank: int) -> int:
    """Find the lowest offset open to each array; return the number passed over, -1 if one is stuck."""
    low, size, remaining, bottom = state.low, instance.size, state.remaining, state.bottom
    passed = 0
    while passed < count and is_passed(low, state.rank, remaining[passed], floor, rank):
        passed += 1
    lift = 0
    if rules.lift:
        lowest_top = instance.capacity
        for position in range(passed, count):
            array = remaining[position]
            lowest_top = min(lowest_top, low[array] + size[array])
        lift = lowest_top
    for position in range(passed):
        array = remaining[position]
        bottom[array] = max(lift, low[array])
        stuck = rules.local_dominance and _is_stuck(instance, state, count, position, floor)
        if stuck or bottom[array] + size[array] > instance.capacity:
            return -1
    for position in range(passed, count):
        bottom[remaining[position]] = low[remaining[position]]
    return passed


@njit(cache=True)
def _is_stuck(instance: Instance, state: State, count: int, position: int, floor: int) -> bool:
    """Return True if no unplaced neighbour of a passed-over array can come to lie across its low end."""
    low, remaining, firsts, lasts = state.low, state.remaining, instance.first, instance.last
    array = remaining[position]
    top = low[array] + instance.size[array]
    first, last = firsts[array], lasts[array]
    for place in range(count):
        other = remaining[place]
        if max(floor, low[other]) >= top:
            return True
        if place != position and firsts[other] < last and first < lasts[other]:
            return False
    return True


@njit(cache=True)
def fits(instance: Instance, state: State, count: int, low: int, high: int, passed: int) -> bool:
    """Return True if every section has room for its unplaced arrays above the lowest of them.

    Arrays are taken by ascending ``bottom``, so the first that paints a section sets its floor; union-find
    passes over what is painted. The first ``passed`` of the list are the passed-over ones, which are sorted
    among themselves, and so are the others: their bottoms are a maximum of their low and one number.
    """
    following, bottoms, remaining = state.following, state.bottom, state.remaining
    total, floor, block = state.total, state.floor, instance.block
    for section in range(low, high + 1):
        following[section] = section
    lifted, other = 0, passed
    while lifted < passed or other < count:
        if other == count or (lifted < passed and bottoms[remaining[lifted]] <= bottoms[remaining[other]]):
            array = remaining[lifted]
            lifted += 1
        else:
            array = remaining[other]
            other += 1
        bottom, last = bottoms[array], instance.last[array]
        section = _unpainted(following, instance.first[array])
        while section < last:
            floor[section] = bottom
            used = bottom + total[section]
            if block[section] < block[section + 1]:
                used += _fixed_above(block, instance.block_low, instance.block_high, section, bottom)
            if used > instance.capacity:
                return False
            following[section] = section + 1
            section = _unpainted(following, section + 1)
    return True


@njit(cache=True, inline="always")
def _unpainted(following: Ints, section: int) -> int:
    """Return the first unpainted section from ``section`` on, halving the path to it."""
    while following[section] != section:
        following[section] = following[following[section]]
        section = following[section]
    return section


@njit(cache=True)
def _fixed_above(block: Ints, block_low: Ints, block_high: Ints, section: int, bottom: int) -> int:
    """Return the bytes of a section's fixed blocks at or above an offset."""
    fixed = 0
    for index in range(block[section], block[section + 1]):
        if block_high[index] > bottom:
            fixed += block_high[index] - max(bottom, block_low[index])
    return fixed


@njit(cache=True, inline="always")
def is_passed(low: Ints, ranks: Ints, array: int, floor: int, rank: int) -> bool:
    """Return True if an unplaced array comes before the last placed one, so that it must rise first."""
    return bool(low[array] < floor or (low[array] == floor and ranks[array] < rank))
