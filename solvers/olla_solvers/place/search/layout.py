"""The data of compiled code: the instance, the state of a search, and the columns of its stacks."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

FOUND, EXHAUSTED, PAUSED, NEEDS_ROOM = 0, 1, 2, 3
"""Outcomes of :func:`run`."""

NODES, WORK, CURRENT, NODE_TOP, LIST_TOP, TRAIL_TOP = range(6)
"""Indices of :attr:`State.register`."""

# Columns of State.node.
(
    OWNER,  # node whose candidate made this component, -1 for the root
    SIBLING,  # next component of the same split, or -1
    START,  # its list in State.lists
    LENGTH,
    SECTION_LOW,  # sections it lies in
    SECTION_HIGH,
    FLOOR,  # offset of the last placed array: nothing goes below
    LAST_RANK,  # at FLOOR only arrays of higher rank may go
    CURSOR,  # next candidate to try
    LIMIT,  # candidates at or above are dominated
    NODE_MARK,  # tops of the stacks when the node began
    LIST_MARK,
    TRAIL_MARK,
    KEY,  # two hashes of its arrays and their lows
    CHECK,
    ALL_ABOVE,  # if it fails, it has no solution with every offset at or above this
) = range(16)
NODE_COLUMNS = 16


class Instance(NamedTuple):
    """The arrays to place, in bytes; arrays are indices.

    Attributes:
        first: for each array its first section.
        last: for each array the section after its last.
        size: for each array.
        alignment: for each array.
        twin: for each array an identical one that must be placed before it, or -1.
        gap: for each array where its forbidden offsets begin in ``gap_low``; one longer.
        gap_low: starts of forbidden ranges of offsets, ascending for each array.
        gap_high: their ends, exclusive.
        block: for each section where its fixed blocks begin in ``block_low``; one longer.
        block_low: first byte of each fixed block.
        block_high: their ends, exclusive.
        capacity: bytes available.
    """

    first: Ints
    last: Ints
    size: Ints
    alignment: Ints
    twin: Ints
    gap: Ints
    gap_low: Ints
    gap_high: Ints
    block: Ints
    block_low: Ints
    block_high: Ints
    capacity: int


class State(NamedTuple):
    """The state of a search.

    Attributes:
        low: for each array the lowest offset allowed; where it lies, once placed.
        rank: for each array its place in the order of trial.
        placed: for each array 1 when it is placed.
        node: the stack of nodes.
        lists: the nodes' lists of arrays, a stack.
        trail: what to restore: (array, its low, its rank), or (-1 - array, 0, 0) for a placed one.
        register: counters and stack tops.
        total: for each section the unplaced bytes; and so on: scratch of one expansion.
        crossing: for each boundary the arrays that cross it.
        floor: for each section the lowest offset of its unplaced arrays.
        following: for each section the next unpainted one.
        bottom: for each array the lowest offset at which it may end up.
        remaining: the unplaced arrays, sorted.
        changed: the arrays just raised.
        key: for each array a sort key.
        failed: components that failed, by key: (key, check, all above), shared by all orders; see
            ``SearchRules.known_failures``.
    """

    low: Ints
    rank: Ints
    placed: Ints
    node: Ints
    lists: Ints
    trail: Ints
    register: Ints
    total: Ints
    crossing: Ints
    floor: Ints
    following: Ints
    bottom: Ints
    remaining: Ints
    changed: Ints
    key: Ints
    failed: Ints


def new_state(arrays: int, sections: int, failed: Ints) -> State:
    """Make room for a search of so many arrays in so many sections."""

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return State(
        low=ints(arrays),
        rank=ints(arrays),
        placed=ints(arrays),
        node=ints(2 * arrays + 2, NODE_COLUMNS),
        lists=ints(16 * arrays + 64),
        trail=ints(8 * arrays + 64, 3),
        register=ints(6),
        total=ints(sections + 2),
        crossing=ints(sections + 2),
        floor=ints(sections + 2),
        following=ints(sections + 2),
        bottom=ints(arrays),
        remaining=ints(arrays),
        changed=ints(arrays),
        key=ints(arrays),
        failed=failed,
    )


def enlarged(state: State) -> State:
    """Return the state with its stacks doubled."""
    return state._replace(
        lists=np.concatenate([state.lists, np.empty_like(state.lists)]),
        trail=np.concatenate([state.trail, np.empty_like(state.trail)]),
    )
