"""Walks the order once and runs again what was dropped: the sequence, lifetimes, bytes and seconds.

Before an operator runs, the dropped units of earlier phases that it reads are made again, depth first with
what they read in turn, so every repetition comes as late as possible. An operator reads the first version of
an array of its own phase, and the newest of others; a repetition reads the newest of all. A version lives
from its producer's timestep to just after its last reader's. Everything here is linear in the length of the
sequence.

The functions run as they stand in plain Python, on lists, and compiled by numba, on arrays of numpy: they use
nothing but numbers and indices. Compilation pays for many thousands of walks only
(:mod:`olla_solvers.recomputation.evaluate`).
"""

from __future__ import annotations

from typing import NamedTuple

from olla_solvers.recomputation.instance import MOST_RUNS, Flat, Numbers

KEPT, ONCE, OFTEN, ALWAYS = 0, 1, 2, 3
"""States of a unit: kept; made again once, before its first reader of a later phase; or after gaps."""

MOMENTS_FROM = 2
"""The bit of a larger state that says that a unit is dropped at the first moment; others follow."""

MOST_MOMENTS = 60
"""That fit into a state of compiled code."""

LONG_GAP, SHORT_GAP = 10, 100
"""Shares of the order, as reciprocals, after which units in states ``OFTEN`` and ``ALWAYS`` are dropped."""

GIVEN, GOT = 1, 2
"""Marks of a version whose memory was taken over, and of one that took some over."""

NEVER = 1 << 60
"""A timestep beyond all."""


class Trace(NamedTuple):
    """What a walk writes; only entries below the numbers that it returns count.

    Of each timestep its operator, the number of the repetition (0 for the operator itself) and the bytes; of
    each position in the order the timestep at which it begins, with what runs again for it; of each version
    of an array its array, bytes, and the timesteps at which it is made, last read by an operator of its phase
    in its place (or made, if by none), first read by any other, and last read. Versions below the number of
    arrays are the arrays themselves.
    """

    operator: Numbers
    copy: Numbers
    timestep_bytes: Numbers
    array: Numbers
    version_bytes: Numbers
    first: Numbers
    last_early: Numbers
    first_late: Numbers
    last: Numbers
    current: Numbers
    runs: Numbers
    demanded: Numbers
    stack_unit: Numbers
    stack_next: Numbers
    taken_at: Numbers
    taken_from: Numbers
    taken_by: Numbers
    is_taken: Numbers
    began: Numbers


def walk(flat: Flat, states: Numbers, trace: Trace) -> tuple[int, int, float]:
    """Run the step with some units dropped.

    Args:
        flat: the step.
        states: of each unit.
        trace: takes the result.

    Returns:
        The number of timesteps and of versions, and the seconds of all repetitions; -1 timesteps if a
        repetition would come too early, too late or too often.
    """
    _clear(flat, trace)
    order, demand_starts, demand_units = flat.order, flat.demand_starts, flat.demand_units
    timestep, versions, taken, seconds = 0, len(flat.array_bytes), 0, 0.0
    for position in range(len(order)):
        operator = order[position]
        trace.began[position] = timestep
        for index in range(demand_starts[operator], demand_starts[operator + 1]):
            unit = demand_units[index]
            if states[unit] == KEPT:
                continue
            if _is_there(flat, states, trace, unit, position):
                continue
            timestep, versions, taken, more = _make(
                flat, states, trace, unit, position, timestep, versions, taken
            )
            if timestep < 0:
                return -1, versions, 0.0
            seconds += more
        versions, taken = _run(flat, trace, operator, 0, timestep, versions, taken)
        timestep += 1
    _count(flat, trace, timestep, versions, taken)
    return timestep, versions, seconds


def excess(trace: Trace, timesteps: int, budget_bytes: int) -> float:
    """Return the bytes beyond a budget, summed over all timesteps."""
    total = 0.0
    for timestep in range(timesteps):
        if trace.timestep_bytes[timestep] > budget_bytes:
            total += trace.timestep_bytes[timestep] - budget_bytes
    return total


def _clear(flat: Flat, trace: Trace) -> None:
    for array in range(len(flat.array_bytes)):
        trace.current[array] = array
        trace.array[array] = array
        trace.version_bytes[array] = 0
        trace.first[array] = 0
        trace.last_early[array] = 0
        trace.first_late[array] = NEVER
        trace.last[array] = 0
    for unit in range(len(flat.latest)):
        trace.runs[unit] = 0
        trace.demanded[unit] = 0


def _is_there(flat: Flat, states: Numbers, trace: Trace, unit: int, position: int) -> bool:
    """Return True if a unit was kept or made again, and not dropped since; it is demanded now."""
    state = states[unit]
    if state > ALWAYS:
        for at in range(len(flat.moments)):
            if trace.demanded[unit] < flat.moments[at] <= position and state >> (MOMENTS_FROM + at) & 1:
                return False
    elif trace.runs[unit] == 0:
        return False
    elif state != ONCE:
        gap = len(flat.order) // (LONG_GAP if state == OFTEN else SHORT_GAP)
        if position - trace.demanded[unit] > gap:
            return False
    trace.demanded[unit] = position
    return True


def _make(
    flat: Flat,
    states: Numbers,
    trace: Trace,
    unit: int,
    position: int,
    timestep: int,
    versions: int,
    taken: int,
) -> tuple[int, int, int, float]:
    """Make a unit again, after the dropped units that it reads."""
    stack_unit, stack_next, runs, demanded = trace.stack_unit, trace.stack_next, trace.runs, trace.demanded
    seconds = 0.0
    depth = 0
    stack_unit[0] = unit
    stack_next[0] = flat.wanted_starts[unit]
    while depth >= 0:
        top = stack_unit[depth]
        index = stack_next[depth]
        if index < flat.wanted_starts[top + 1]:
            stack_next[depth] = index + 1
            wanted = flat.wanted_units[index]
            if states[wanted] == KEPT:
                continue
            if _is_there(flat, states, trace, wanted, position):
                continue
            depth += 1
            stack_unit[depth] = wanted
            stack_next[depth] = flat.wanted_starts[wanted]
            continue
        depth -= 1
        if position < flat.earliest[top] or position > flat.latest[top] or runs[top] >= MOST_RUNS:
            return -1, versions, taken, seconds
        runs[top] += 1
        demanded[top] = position
        seconds += flat.unit_seconds[top]
        for maker in range(flat.unit_starts[top], flat.unit_starts[top + 1]):
            operator = flat.unit_operators[maker]
            versions, taken = _run(flat, trace, operator, runs[top], timestep, versions, taken)
            timestep += 1
    return timestep, versions, taken, seconds


def _run(
    flat: Flat,
    trace: Trace,
    operator: int,
    copy: int,
    timestep: int,
    versions: int,
    taken: int,
) -> tuple[int, int]:
    """Note one run of an operator: the versions that it makes, and those that it reads."""
    trace.operator[timestep] = operator
    trace.copy[timestep] = copy
    phase = flat.phase[operator]
    for index in range(flat.taken_starts[operator], flat.taken_starts[operator + 1]):
        read = flat.taken_from[index]
        trace.taken_at[taken] = timestep
        trace.taken_from[taken] = trace.current[read] if copy or flat.array_phase[read] < phase else read
        made = flat.taken_by[index]
        # The versions that are made below have their numbers in the sequence of the arrays made.
        trace.taken_by[taken] = made if copy == 0 else versions + _place(flat, operator, made)
        taken += 1
    for index in range(flat.made_starts[operator], flat.made_starts[operator + 1]):
        array = flat.made_arrays[index]
        if copy == 0:
            version = array
            trace.version_bytes[version] = flat.array_bytes[array]
        else:
            version = versions
            versions += 1
            trace.array[version] = array
            trace.version_bytes[version] = flat.repeated_bytes[array]
            trace.first_late[version] = NEVER
            if flat.unit_of[array] >= 0:
                trace.current[array] = version
        trace.first[version] = timestep
        trace.last_early[version] = timestep
        trace.last[version] = timestep
    for index in range(flat.read_starts[operator], flat.read_starts[operator + 1]):
        array = flat.read_arrays[index]
        reads_newest = copy > 0 or flat.array_phase[array] < phase
        version = trace.current[array] if reads_newest else array
        trace.last[version] = timestep
        if not reads_newest:
            trace.last_early[version] = timestep
        elif trace.first_late[version] == NEVER:
            trace.first_late[version] = timestep
    return versions, taken


def _place(flat: Flat, operator: int, array: int) -> int:
    """Return the place of an array among those that an operator makes."""
    place = 0
    while flat.made_arrays[flat.made_starts[operator] + place] != array:
        place += 1
    return place


def _count(flat: Flat, trace: Trace, timesteps: int, versions: int, taken: int) -> None:
    """Write the bytes of each timestep: what is alive or lent, the workspace, less what is taken over.

    An array that is lent is elsewhere as its stays say, even if something that runs again reads it.
    """
    change = trace.timestep_bytes
    for timestep in range(timesteps + 1):
        change[timestep] = 0
    for version in range(versions):
        size = trace.version_bytes[version]
        if size > 0:
            change[trace.first[version]] += size
            change[trace.last[version] + 1] -= size
        trace.is_taken[version] = 0
    for index in range(len(flat.lent_positions)):
        change[trace.began[flat.lent_positions[index]]] += flat.lent_changes[index]
    for index in range(len(flat.stay_arrays)):
        array = flat.stay_arrays[index]
        gone, back = trace.began[flat.stay_from[index]], trace.began[flat.stay_until[index]]
        if trace.last_early[array] < gone < back <= trace.first_late[array] < NEVER:
            change[gone] -= trace.version_bytes[array]
            change[back] += trace.version_bytes[array]
    alive = 0
    for timestep in range(timesteps):
        alive += change[timestep]
        change[timestep] = alive + flat.workspace_bytes[trace.operator[timestep]]
    for index in range(taken):
        timestep, read, made = trace.taken_at[index], trace.taken_from[index], trace.taken_by[index]
        # What took over memory may be taken over in turn: two marks, one for each role.
        if (
            trace.last[read] == timestep
            and not trace.is_taken[read] & GIVEN
            and not trace.is_taken[made] & GOT
        ):
            trace.is_taken[read] |= GIVEN
            trace.is_taken[made] |= GOT
            change[timestep] -= trace.version_bytes[read]


PARTS = (_clear, _is_there, _make, _run, _place, _count)
"""The functions of which a walk consists."""
