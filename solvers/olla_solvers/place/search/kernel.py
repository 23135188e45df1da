"""The compiled depth-first search over canonical placements, resumable at any node.

A node holds one component: unplaced arrays that share no section with any other unplaced array, listed by
(lowest allowed offset, rank). Trying a candidate puts it at its lowest allowed offset, raises the arrays
above it, checks every section of the component and splits what is left into components, which become the
children: all must succeed, and one that fails takes the candidate with it. The stack is explicit and lives
in the :class:`State`, so a run may stop after any number of nodes and go on later; Python looks at the
clock and enlarges the scratch space in between.

Every rule is explained and proven at its switch in :class:`olla_solvers.place.search.rules.SearchRules`.

All compiled functions are in this one file: numba's cache looks for changes in a function's own file only.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit

from olla_solvers.place.search.rules import Switches

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
    HATLESS,  # the candidate being tried overlaps nothing unplaced
    NODE_MARK,  # tops of the stacks when the node began
    LIST_MARK,
    TRAIL_MARK,
) = range(14)
NODE_COLUMNS = 14


class Instance(NamedTuple):
    """What is placed, in units; arrays are indices.

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
        block_low: first unit of each fixed block.
        block_high: their ends, exclusive.
        capacity: units available.
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
    """Where the search stands.

    Attributes:
        low: for each array the lowest offset allowed; where it lies, once placed.
        rank: for each array its place in the order of trial.
        placed: for each array 1 when it is placed.
        node: the stack of nodes.
        lists: the nodes' lists of arrays, a stack.
        trail: what to restore: (array, its low, its rank), or (-1 - array, 0, 0) for a placed one.
        register: counters and stack tops.
        total: for each section the unplaced units; and so on: scratch of one expansion.
        crossing: for each boundary the arrays that cross it.
        floor: for each section the lowest offset of its unplaced arrays.
        following: for each section the next unpainted one.
        remaining: the unplaced arrays, sorted.
        changed: the arrays just raised.
        key: for each array a sort key.
        rerank: 1 in its only entry to rank by remaining totals at splits.
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
    remaining: Ints
    changed: Ints
    key: Ints
    rerank: Ints


@njit(cache=True)
def begin(instance: Instance, rules: Switches, state: State, order: Ints) -> int:
    """Make the root and its components; returns EXHAUSTED when it fails at once, else PAUSED.

    Args:
        instance: what to place.
        rules: which rules are on.
        state: with ``low`` and ``rank`` set.
        order: all arrays by (low, rank).
    """
    node, register = state.node, state.register
    register[:] = 0
    node[0, :] = 0
    node[0, OWNER] = -1
    node[0, SIBLING] = -1
    register[NODE_TOP] = 1
    state.remaining[: len(order)] = order
    for array in order:
        if state.low[array] + instance.size[array] > instance.capacity:
            return EXHAUSTED
    child = _split(instance, rules, state, 0, len(order), 0, len(state.total) - 1, 0, -1)
    if child < 0:
        return EXHAUSTED
    if child == 0:
        return FOUND
    _activate(instance, rules, state, child)
    return PAUSED


@njit(cache=True)
def run(instance: Instance, rules: Switches, state: State, nodes: int, work: int) -> int:
    """Search on until an outcome, or until a counter reaches its limit."""
    node, register = state.node, state.register
    while True:
        if register[NODES] >= nodes or register[WORK] >= work:
            return PAUSED
        current = register[CURRENT]
        _undo(state, current)
        position = _next_candidate(instance, rules, state, current)
        node[current, CURSOR] = position
        if position >= node[current, LENGTH]:
            owner = node[current, OWNER]
            if owner < 0:
                return EXHAUSTED
            if rules.hatless and node[owner, HATLESS]:
                node[owner, CURSOR] = node[owner, LENGTH]
            register[CURRENT] = owner
            continue
        if not _has_room(state, node[current, LENGTH]):
            return NEEDS_ROOM
        register[NODES] += 1
        node[current, CURSOR] = position + 1
        child = _place(instance, rules, state, current, position)
        if child < 0:
            if rules.hatless and node[current, HATLESS]:
                node[current, CURSOR] = node[current, LENGTH]
            continue
        if child == 0:
            child = _after_success(node, current)
            if child < 0:
                return FOUND
        _activate(instance, rules, state, child)


@njit(cache=True)
def _has_room(state: State, length: int) -> bool:
    """Whether one expansion of a list fits: a list, a trail entry for each rise, each rank and the array."""
    register = state.register
    if register[LIST_TOP] + length > len(state.lists):
        return False
    return bool(register[TRAIL_TOP] + 2 * length + 1 <= len(state.trail))


@njit(cache=True)
def _activate(instance: Instance, rules: Switches, state: State, index: int) -> None:
    """Begin a node: mark the stacks, find its first candidate and its limit."""
    register = state.register
    node = state.node[index]
    register[CURRENT] = index
    node[NODE_MARK] = register[NODE_TOP]
    node[LIST_MARK] = register[LIST_TOP]
    node[TRAIL_MARK] = register[TRAIL_TOP]
    limit = instance.capacity
    if rules.dominance:
        for position in range(node[START], node[START] + node[LENGTH]):
            array = state.lists[position]
            limit = min(limit, state.low[array] + instance.size[array])
    node[LIMIT] = limit
    cursor = 0
    while cursor < node[LENGTH] and _passed(
        state, state.lists[node[START] + cursor], node[FLOOR], node[LAST_RANK]
    ):
        cursor += 1
    node[CURSOR] = cursor


@njit(cache=True)
def _passed(state: State, array: int, floor: int, rank: int) -> bool:
    """Whether an unplaced array comes before the last placed one, so that it must rise first."""
    low = state.low[array]
    return bool(low < floor or (low == floor and state.rank[array] < rank))


@njit(cache=True)
def _next_candidate(instance: Instance, rules: Switches, state: State, index: int) -> int:
    """Position of the next array to try at or after the cursor; the list's length when there is none."""
    node = state.node[index]
    length = node[LENGTH]
    for position in range(node[CURSOR], length):
        array = state.lists[node[START] + position]
        if state.low[array] >= node[LIMIT]:
            return int(length)
        twin = instance.twin[array]
        if not rules.identical or twin < 0 or state.placed[twin]:
            return position
    return int(length)


@njit(cache=True)
def _after_success(node: Ints, index: int) -> int:
    """The component to go on with when one is placed completely, or -1 when all are."""
    while index >= 0:
        if node[index, SIBLING] >= 0:
            return int(node[index, SIBLING])
        index = node[index, OWNER]
    return -1


@njit(cache=True)
def _undo(state: State, index: int) -> None:
    """Take back all that happened since a node began."""
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
def _remember(state: State, array: int) -> None:
    """Put an array's low and rank on the trail before they change."""
    top = state.register[TRAIL_TOP]
    state.trail[top, 0] = array
    if array >= 0:
        state.trail[top, 1] = state.low[array]
        state.trail[top, 2] = state.rank[array]
    state.register[TRAIL_TOP] = top + 1


@njit(cache=True)
def _fit(instance: Instance, array: int, offset: int) -> int:
    """The lowest aligned offset from ``offset`` on at which an array collides with no fixed block."""
    alignment = instance.alignment[array]
    if alignment > 1:
        offset = (offset + alignment - 1) // alignment * alignment
    for index in range(instance.gap[array], instance.gap[array + 1]):
        if offset < instance.gap_high[index] and offset >= instance.gap_low[index]:
            offset = (instance.gap_high[index] + alignment - 1) // alignment * alignment
    return offset


@njit(cache=True)
def _before(state: State, one: int, other: int) -> bool:
    """Whether an array stands before another in a node's list."""
    if state.low[one] != state.low[other]:
        return bool(state.low[one] < state.low[other])
    return bool(state.rank[one] < state.rank[other])


@njit(cache=True)
def _sort(state: State, arrays: Ints, count: int) -> None:
    """Shell sort by (low, rank): the lists are short or nearly sorted."""
    step = 1
    while step < count // 3:
        step = 3 * step + 1
    while step > 0:
        for index in range(step, count):
            array = arrays[index]
            hole = index
            while hole >= step and _before(state, array, arrays[hole - step]):
                arrays[hole] = arrays[hole - step]
                hole -= step
            arrays[hole] = array
        step //= 3


@njit(cache=True)
def _place(instance: Instance, rules: Switches, state: State, index: int, position: int) -> int:
    """Put a node's candidate down; first child, 0 when nothing is left, -1 when it cannot be."""
    node = state.node[index]
    start, length = node[START], node[LENGTH]
    chosen = state.lists[start + position]
    offset = state.low[chosen]
    top = offset + instance.size[chosen]
    first, last = instance.first[chosen], instance.last[chosen]
    state.placed[chosen] = 1
    _remember(state, -1 - chosen)
    kept, raised, touched = 0, 0, False
    for place in range(length):
        array = state.lists[start + place]
        if place == position:
            continue
        if instance.first[array] < last and first < instance.last[array]:
            touched = True
            if state.low[array] < top:
                rise = _fit(instance, array, top)
                if rise + instance.size[array] > instance.capacity:
                    node[HATLESS] = False
                    return -1
                _remember(state, array)
                state.low[array] = rise
                state.changed[raised] = array
                raised += 1
                continue
        state.remaining[kept] = array
        kept += 1
    node[HATLESS] = not touched
    _sort(state, state.changed, raised)
    _merge(state, kept, raised)
    return _split(
        instance,
        rules,
        state,
        index,
        kept + raised,
        node[SECTION_LOW],
        node[SECTION_HIGH],
        offset,
        state.rank[chosen],
    )


@njit(cache=True)
def _merge(state: State, kept: int, raised: int) -> None:
    """Merge the raised arrays into the remaining ones, from the end."""
    target = kept + raised
    while raised > 0:
        target -= 1
        if kept > 0 and _before(state, state.changed[raised - 1], state.remaining[kept - 1]):
            kept -= 1
            state.remaining[target] = state.remaining[kept]
        else:
            raised -= 1
            state.remaining[target] = state.changed[raised]


@njit(cache=True)
def _split(
    instance: Instance,
    rules: Switches,
    state: State,
    owner: int,
    count: int,
    low: int,
    high: int,
    floor: int,
    rank: int,
) -> int:
    """Check what remains of a component and make its parts children; see :func:`_place`."""
    state.register[WORK] += count + high - low + 1
    if count == 0:
        return 0
    _sweep(instance, state, count, low, high)
    if rules.section_floors and not _fits(instance, rules, state, count, low, high, floor):
        return -1
    if rules.local_dominance and _has_dead_end(instance, state, count, floor, rank):
        return -1
    first = state.register[NODE_TOP]
    node = state.node
    section = low
    while section < high:
        if state.total[section] == 0:
            section += 1
            continue
        end = section + 1
        while end < high and (state.crossing[end] > 0 or (not rules.decompose and end < high)):
            end += 1
        child = state.register[NODE_TOP]
        state.register[NODE_TOP] = child + 1
        node[child, OWNER] = owner
        node[child, SECTION_LOW] = section
        node[child, SECTION_HIGH] = end
        node[child, FLOOR] = floor
        node[child, LAST_RANK] = rank
        node[child, LENGTH] = 0
        for inside in range(section, end):
            state.following[inside] = child
        section = end
    _distribute(instance, state, count, first)
    several = state.register[NODE_TOP] - first > 1
    if state.rerank[0] > 0 and rules.rerank and (several or owner == 0):
        for child in range(first, state.register[NODE_TOP]):
            _rerank(instance, state, child)
    return _tightest_first(instance, state, first)


@njit(cache=True)
def _sweep(instance: Instance, state: State, count: int, low: int, high: int) -> None:
    """Totals of the sections in ``[low, high)`` and how many arrays cross each boundary."""
    total, crossing = state.total, state.crossing
    total[low : high + 1] = 0
    crossing[low : high + 1] = 0
    for position in range(count):
        array = state.remaining[position]
        first, last = instance.first[array], instance.last[array]
        total[first] += instance.size[array]
        total[last] -= instance.size[array]
        crossing[first + 1] += 1
        crossing[last] -= 1
    for section in range(low + 1, high + 1):
        total[section] += total[section - 1]
        crossing[section] += crossing[section - 1]


@njit(cache=True)
def _fits(
    instance: Instance, rules: Switches, state: State, count: int, low: int, high: int, floor: int
) -> bool:
    """Whether every section has room for its unplaced arrays above the lowest of them.

    Arrays ascend in their lowest offset, so the first that paints a section sets its floor; union-find
    passes over what is painted.
    """
    following = state.following
    for section in range(low, high + 1):
        following[section] = section
    for position in range(count):
        array = state.remaining[position]
        bottom = state.low[array]
        if rules.monotone_floor and bottom < floor:
            bottom = floor
        last = instance.last[array]
        section = _unpainted(following, instance.first[array])
        while section < last:
            state.floor[section] = bottom
            used = bottom + state.total[section] + _fixed_above(instance, section, bottom)
            if used > instance.capacity:
                return False
            following[section] = section + 1
            section = _unpainted(following, section + 1)
    return True


@njit(cache=True)
def _unpainted(following: Ints, section: int) -> int:
    """The first unpainted section from ``section`` on, halving the path to it."""
    while following[section] != section:
        following[section] = following[following[section]]
        section = following[section]
    return section


@njit(cache=True)
def _fixed_above(instance: Instance, section: int, bottom: int) -> int:
    """Units of a section's fixed blocks at or above an offset."""
    units = 0
    for index in range(instance.block[section], instance.block[section + 1]):
        if instance.block_high[index] > bottom:
            units += instance.block_high[index] - max(bottom, instance.block_low[index])
    return units


@njit(cache=True)
def _has_dead_end(instance: Instance, state: State, count: int, floor: int, rank: int) -> bool:
    """Whether some passed-over array has nothing unplaced that could still lift it."""
    for position in range(count):
        array = state.remaining[position]
        if not _passed(state, array, floor, rank):
            return False
        top = state.low[array] + instance.size[array]
        first, last = instance.first[array], instance.last[array]
        liftable = False
        for place in range(count):
            other = state.remaining[place]
            if max(floor, state.low[other]) >= top:
                break
            if place != position and instance.first[other] < last and first < instance.last[other]:
                liftable = True
                break
        if not liftable:
            return True
    return False


@njit(cache=True)
def _distribute(instance: Instance, state: State, count: int, first: int) -> None:
    """Cut the sorted list into one for each new node; ``following`` tells a section's node."""
    node, register = state.node, state.register
    for position in range(count):
        node[state.following[instance.first[state.remaining[position]]], LENGTH] += 1
    top = register[LIST_TOP]
    for child in range(first, register[NODE_TOP]):
        node[child, START] = top
        top += node[child, LENGTH]
        node[child, LENGTH] = 0
    for position in range(count):
        array = state.remaining[position]
        child = state.following[instance.first[array]]
        state.lists[node[child, START] + node[child, LENGTH]] = array
        node[child, LENGTH] += 1
    register[LIST_TOP] = top


@njit(cache=True)
def _rerank(instance: Instance, state: State, child: int) -> None:
    """Rank a component's arrays by their tightest section first, then as before."""
    node = state.node[child]
    start, length = node[START], node[LENGTH]
    for position in range(length):
        array = state.lists[start + position]
        _remember(state, array)
        most = 0
        for section in range(instance.first[array], instance.last[array]):
            load = state.total[section]
            if state.rerank[0] == 2:
                load += state.floor[section]
            most = max(most, load)
        state.key[array] = most
        state.changed[position] = array
    step = 1
    while step < length // 3:
        step = 3 * step + 1
    while step > 0:
        for index in range(step, length):
            array = state.changed[index]
            hole = index
            while hole >= step and _tighter(state, array, state.changed[hole - step]):
                state.changed[hole] = state.changed[hole - step]
                hole -= step
            state.changed[hole] = array
        step //= 3
    for position in range(length):
        state.rank[state.changed[position]] = position
    _sort(state, state.lists[start : start + length], length)
    node[LAST_RANK] = -1


@njit(cache=True)
def _tighter(state: State, one: int, other: int) -> bool:
    """Whether an array ranks before another by key, or by rank among equal keys."""
    if state.key[one] != state.key[other]:
        return bool(state.key[one] > state.key[other])
    return bool(state.rank[one] < state.rank[other])


@njit(cache=True)
def _tightest_first(instance: Instance, state: State, first: int) -> int:
    """Chain new nodes by SIBLING, the one with the least room in a section first; returns its index."""
    node = state.node
    head = -1
    for child in range(first, state.register[NODE_TOP]):
        most = 0
        for section in range(node[child, SECTION_LOW], node[child, SECTION_HIGH]):
            if state.total[section] > 0:
                most = max(most, state.floor[section] + state.total[section])
        node[child, LIMIT] = most
        before, after = -1, head
        while after >= 0 and node[after, LIMIT] >= most:
            before, after = after, node[after, SIBLING]
        node[child, SIBLING] = after
        if before < 0:
            head = child
        else:
            node[before, SIBLING] = child
    return head
