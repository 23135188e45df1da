"""Compiled memory of components that failed: see ``SearchRules.known_failures``."""

from __future__ import annotations

from numba import njit

from olla_solvers.place.search.checks import is_passed
from olla_solvers.place.search.layout import (
    ALL_ABOVE,
    CHECK,
    FLOOR,
    KEY,
    LAST_RANK,
    LENGTH,
    START,
    State,
)


@njit(cache=True)
def is_known_failure(state: State, child: int) -> bool:
    """Return True if a new node's arrays are known to have no solution above its first candidate."""
    node, low = state.node[child], state.low
    key, check, first = 0, 0, -1
    previous = -1
    for position in range(node[START], node[START] + node[LENGTH]):
        array = state.lists[position]
        mixed = (array * 2654435761 + low[array] + 1) * -7046029254386353131
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        mixed *= -4658895280553007687
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        key += mixed
        mixed = mixed * -5435081209227447693 + 1442695040888963407
        check += mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
        if first < 0:
            if is_passed(low, state.rank, array, node[FLOOR], node[LAST_RANK]):
                previous = low[array]
            else:
                first = low[array]
    if first < 0:
        return True
    node[KEY], node[CHECK] = key, check
    node[ALL_ABOVE] = first + 1 if previous == first else first
    entry = state.failed[key & (len(state.failed) - 1)]
    return bool(entry[0] == key and entry[1] == check and entry[2] <= first)


@njit(cache=True)
def remember_failure(state: State, index: int) -> None:
    """Keep a node that failed, over what was kept in its place."""
    node = state.node[index]
    entry = state.failed[node[KEY] & (len(state.failed) - 1)]
    if entry[0] == node[KEY] and entry[1] == node[CHECK] and entry[2] <= node[ALL_ABOVE]:
        return
    entry[0], entry[1], entry[2] = node[KEY], node[CHECK], node[ALL_ABOVE]
