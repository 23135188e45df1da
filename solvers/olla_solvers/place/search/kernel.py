"""The compiled depth-first search over canonical placements, resumable at any node.

A node holds one component: unplaced arrays that share no section with any other unplaced array, listed by
(lowest allowed offset, rank). Trying a candidate puts it at its lowest allowed offset, raises the arrays
above it, checks every section of the component and splits what is left into components, which become the
children: all must succeed, and one that fails takes the candidate with it. The stack is explicit and lives
in the :class:`State`, so a run may stop after any number of nodes and go on later; Python looks at the
clock and enlarges the scratch space in between.

Every rule is explained and proven at its switch in :class:`olla_solvers.place.search.rules.SearchRules`.

numba's cache looks for changes in the file of the function that Python calls, and those are all in this file:
whoever edits ``checks`` or ``lists`` must change it, too.
"""

from __future__ import annotations

from numba import njit

from olla_solvers.place.search.checks import bottoms, fits, is_passed, sweep
from olla_solvers.place.search.failures import is_known_failure, remember_failure
from olla_solvers.place.search.layout import (
    CURRENT,
    CURSOR,
    EXHAUSTED,
    FLOOR,
    FOUND,
    LAST_RANK,
    LENGTH,
    LIMIT,
    LIST_MARK,
    LIST_TOP,
    NEEDS_ROOM,
    NODE_MARK,
    NODE_TOP,
    NODES,
    OWNER,
    PAUSED,
    SECTION_HIGH,
    SECTION_LOW,
    SIBLING,
    START,
    TRAIL_MARK,
    TRAIL_TOP,
    WORK,
    Instance,
    Ints,
    State,
)
from olla_solvers.place.search.lists import fit, has_room, merge, remember, sort, undo
from olla_solvers.place.search.rules import Switches


@njit(cache=True)
def begin(instance: Instance, rules: Switches, state: State, order: Ints) -> int:
    """Make the root and its components; return EXHAUSTED if it fails at once, else PAUSED.

    Args:
        instance: the arrays to place.
        rules: the rules that are on.
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
        undo(state, current)
        position = _next_candidate(instance, rules, state, current)
        node[current, CURSOR] = position
        if position >= node[current, LENGTH]:
            owner = node[current, OWNER]
            if rules.known_failures:
                remember_failure(state, current)
            if owner < 0:
                return EXHAUSTED
            register[CURRENT] = owner
            continue
        if not has_room(state, node[current, LENGTH]):
            return NEEDS_ROOM
        register[NODES] += 1
        node[current, CURSOR] = position + 1
        child = _place(instance, rules, state, current, position)
        if child < 0:
            continue
        if child == 0:
            child = _after_success(node, current)
            if child < 0:
                return FOUND
        _activate(instance, rules, state, child)


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
    while cursor < node[LENGTH]:
        array = state.lists[node[START] + cursor]
        if not is_passed(state.low, state.rank, array, node[FLOOR], node[LAST_RANK]):
            break
        cursor += 1
    node[CURSOR] = cursor


@njit(cache=True)
def _next_candidate(instance: Instance, rules: Switches, state: State, index: int) -> int:
    """Return the position of the next array to try from the cursor on; the list's length if there is none."""
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
    """Return the component to go on with when one is placed completely, or -1 if all are."""
    while index >= 0:
        if node[index, SIBLING] >= 0:
            return int(node[index, SIBLING])
        index = node[index, OWNER]
    return -1


@njit(cache=True)
def _place(instance: Instance, rules: Switches, state: State, index: int, position: int) -> int:
    """Put a node's candidate down; return the first child, 0 if nothing is left, -1 if it cannot be."""
    node = state.node[index]
    low, size, firsts, lasts = state.low, instance.size, instance.first, instance.last
    gap, alignment = instance.gap, instance.alignment
    start, length = node[START], node[LENGTH]
    chosen = state.lists[start + position]
    offset = low[chosen]
    top = offset + size[chosen]
    first, last = firsts[chosen], lasts[chosen]
    state.placed[chosen] = 1
    remember(state.trail, state.register, -1 - chosen, 0, 0)
    kept, raised = 0, 0
    for place in range(length):
        array = state.lists[start + place]
        if place == position:
            continue
        if firsts[array] < last and first < lasts[array] and low[array] < top:
            rise = top
            if alignment[array] > 1 or gap[array] < gap[array + 1]:
                rise = fit(gap, instance.gap_low, instance.gap_high, alignment[array], array, top)
            if rise + size[array] > instance.capacity:
                return -1
            remember(state.trail, state.register, array, low[array], state.rank[array])
            low[array] = rise
            state.changed[raised] = array
            raised += 1
            continue
        state.remaining[kept] = array
        kept += 1
    sort(state.low, state.rank, state.changed, raised)
    merge(state, kept, raised)
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
    sweep(instance, state, count, low, high)
    passed = bottoms(instance, rules, state, count, floor, rank)
    if passed < 0:
        return -1
    if rules.section_floors and not fits(instance, state, count, low, high, passed):
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
    if rules.rerank and (several or owner == 0):
        for child in range(first, state.register[NODE_TOP]):
            _rerank(instance, state, child)
    if rules.known_failures:
        for child in range(first, state.register[NODE_TOP]):
            if is_known_failure(state, child):
                return -1
    return _tightest_first(instance, state, first)


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
        remember(state.trail, state.register, array, state.low[array], state.rank[array])
        most = 0
        for section in range(instance.first[array], instance.last[array]):
            most = max(most, state.total[section])
        state.key[array] = -most
        state.changed[position] = array
    sort(state.key, state.rank, state.changed, length)
    for position in range(length):
        state.rank[state.changed[position]] = position
    sort(state.low, state.rank, state.lists[start : start + length], length)
    node[LAST_RANK] = -1


@njit(cache=True)
def _tightest_first(instance: Instance, state: State, first: int) -> int:
    """Chain new nodes by SIBLING, the one with the least room in a section first; return its index."""
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
