"""Compiled functions that keep the nodes' sorted lists, and the trail that takes changes back."""

from __future__ import annotations

from numba import njit

from olla_solvers.place.search.layout import (
    LIST_MARK,
    LIST_TOP,
    NODE_MARK,
    NODE_TOP,
    TRAIL_MARK,
    TRAIL_TOP,
    Ints,
    State,
)


@njit(cache=True, inline="always")
def before(low: Ints, rank: Ints, first: int, second: int) -> bool:
    """Return True if the first array stands before the second in a node's list."""
    return bool(low[first] < low[second] or (low[first] == low[second] and rank[first] < rank[second]))


@njit(cache=True)
def sort(low: Ints, rank: Ints, arrays: Ints, count: int) -> None:
    """Shell sort by (low, rank): the lists are short or nearly sorted."""
    step = 1
    while step < count // 3:
        step = 3 * step + 1
    while step > 0:
        for index in range(step, count):
            array = arrays[index]
            hole = index
            while hole >= step and before(low, rank, array, arrays[hole - step]):
                arrays[hole] = arrays[hole - step]
                hole -= step
            arrays[hole] = array
        step //= 3


@njit(cache=True)
def merge(state: State, kept: int, raised: int) -> None:
    """Merge the raised arrays into the remaining ones, from the end."""
    target = kept + raised
    while raised > 0:
        target -= 1
        if kept > 0 and before(state.low, state.rank, state.changed[raised - 1], state.remaining[kept - 1]):
            kept -= 1
            state.remaining[target] = state.remaining[kept]
        else:
            raised -= 1
            state.remaining[target] = state.changed[raised]


@njit(cache=True)
def remember(trail: Ints, register: Ints, array: int, low: int, rank: int) -> None:
    """Put an array's low and rank on the trail before they change."""
    top = register[TRAIL_TOP]
    trail[top, 0], trail[top, 1], trail[top, 2] = array, low, rank
    register[TRAIL_TOP] = top + 1


@njit(cache=True)
def undo(state: State, index: int) -> None:
    """Take back all changes since a node began."""
    node, register = state.node[index], state.register
    for position in range(register[TRAIL_TOP] - 1, node[TRAIL_MARK] - 1, -1):
        array = state.trail[position, 0]
        if array < 0:
            state.placed[-1 - array] = 0
        else:
            state.low[array] = state.trail[position, 1]
            state.rank[array] = state.trail[position, 2]
    register[TRAIL_TOP] = node[TRAIL_MARK]
    register[LIST_TOP] = node[LIST_MARK]
    register[NODE_TOP] = node[NODE_MARK]


@njit(cache=True)
def fit(gap: Ints, gap_low: Ints, gap_high: Ints, alignment: int, array: int, offset: int) -> int:
    """Return the lowest aligned offset from ``offset`` on at which an array hits no fixed block."""
    offset = (offset + alignment - 1) // alignment * alignment
    for index in range(gap[array], gap[array + 1]):
        if gap_low[index] <= offset < gap_high[index]:
            offset = (gap_high[index] + alignment - 1) // alignment * alignment
    return offset


@njit(cache=True)
def has_room(state: State, length: int) -> bool:
    """Return True if one expansion fits: a list, a trail entry for each rise, each rank and the array."""
    register = state.register
    if register[LIST_TOP] + length > len(state.lists):
        return False
    return bool(register[TRAIL_TOP] + 2 * length + 1 <= len(state.trail))
