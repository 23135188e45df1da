"""Checks a plan against its problem, as the oracle: it shares no code with the planners.

Everything is derived anew from the problem's lists: which order is executable, which arrays live when
(half open, from the producer's timestep to just after the last consumer's; an unread array and a
workspace for one timestep), and that no two things alive together share a byte (OLLA §3.3, the condition
that equations 6-7 encode). Overlaps are found by one sweep over time that keeps the live intervals sorted
by offset: only neighbours can collide first. Copies run beside operators: while one does, nobody else
reads or writes what it makes, and from when it begins nobody does what it copies, unless that is on the
host, where nothing but copies writes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from olla_solvers.errors import ValidationError
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Array, ArrayKind, Problem


class _Block(NamedTuple):
    """Bytes ``[offset, offset + size)`` during timesteps ``[lower, upper)``."""

    kind: str
    name: str
    lower: int
    upper: int
    offset: int
    size: int

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r}"


def validate(problem: Problem, plan: MemoryPlan) -> None:
    """Check that a plan is executable, collision-free and honest about its peak.

    Args:
        problem: what was planned.
        plan: its order and offsets, by name.

    Raises:
        ValidationError: if there is a violation; names the two arrays or operators of the first.
    """
    timestep = _check_order(problem, plan.order)
    _check_names(problem, plan)
    _check_copies(problem, timestep)
    blocks = _blocks(problem, plan, timestep)
    _check_inside(blocks, plan.buffer_bytes)
    _check_alignment(problem.arrays, ArrayKind.PLANNED, plan.offsets)
    _check_overlaps(blocks)
    _check_figures(blocks, plan)
    on_host = _array_blocks(problem, ArrayKind.HOST, plan.host_offsets, timestep)
    _check_inside(on_host, plan.host_bytes, "the host's buffer")
    _check_alignment(problem.arrays, ArrayKind.HOST, plan.host_offsets)
    _check_overlaps(on_host)


def _check_order(problem: Problem, order: tuple[str, ...]) -> dict[str, int]:
    names = {operator.name for operator in problem.operators}
    timestep: dict[str, int] = {}
    for position, name in enumerate(order):
        if name not in names:
            raise ValidationError(f"the order runs operator {name!r}, which the problem does not have")
        if name in timestep:
            raise ValidationError(
                f"the order runs operator {name!r} twice, at timesteps {timestep[name]} and {position}"
            )
        timestep[name] = position
    missing = next((operator.name for operator in problem.operators if operator.name not in timestep), None)
    if missing is not None:
        raise ValidationError(f"the order never runs operator {missing!r}")
    at = [timestep[operator.name] for operator in problem.operators]
    for array in problem.arrays:
        producer = array.producer
        if producer is not None:
            for consumer in array.consumers:
                if at[producer] > at[consumer]:
                    raise _too_early(problem, at, producer, consumer, f"reads array {array.name!r} of")
    for earlier, later in problem.before:
        if at[earlier] > at[later]:
            raise _too_early(problem, at, earlier, later, "must wait for")
    return timestep


def _too_early(problem: Problem, at: list[int], earlier: int, later: int, why: str) -> ValidationError:
    first, second = problem.operators[earlier].name, problem.operators[later].name
    return ValidationError(
        f"operator {second!r} runs at timestep {at[later]}, but it {why} operator {first!r}, "
        f"which runs only at timestep {at[earlier]}"
    )


def _check_copies(problem: Problem, timestep: Mapping[str, int]) -> None:
    """Check that a copy reads what nobody changes any more, and is read by nobody before it is done."""
    at = [timestep[operator.name] for operator in problem.operators]
    wait_of = dict(problem.copies)
    if len(wait_of) < len(problem.copies):
        raise ValidationError("an operator begins two copies")
    for array in problem.arrays:
        for begin in (array.producer, *array.consumers):
            if begin not in wait_of:
                continue
            wait = wait_of[begin]
            if at[wait] < at[begin]:
                raise ValidationError(
                    f"operator {problem.operators[wait].name!r} waits at timestep {at[wait]} for a copy that "
                    f"begins only at timestep {at[begin]}"
                )
            if begin != array.producer and wait not in array.consumers:
                continue  # it does not copy this one
            for user in array.consumers:
                is_too_early = begin == array.producer and at[user] < at[wait]
                is_source = begin != array.producer and array.kind is not ArrayKind.HOST
                is_too_late = is_source and at[user] > at[begin]
                if user not in (begin, wait) and (is_too_early or is_too_late):
                    moment = "before its copy is done" if is_too_early else "while it is copied, or after it"
                    raise ValidationError(
                        f"operator {problem.operators[user].name!r}, at timestep {at[user]}, uses array "
                        f"{array.name!r} {moment}: [{at[begin]}, {at[wait]}]"
                    )


def _check_names(problem: Problem, plan: MemoryPlan) -> None:
    _check_offsets(problem, ArrayKind.PLANNED, plan.offsets)
    _check_offsets(problem, ArrayKind.HOST, plan.host_offsets)
    scratching = {operator.name for operator in problem.operators if operator.workspace_bytes > 0}
    for name in sorted(scratching - set(plan.workspace_offsets)):
        raise ValidationError(f"operator {name!r} needs a workspace, which has no offset")
    for name in sorted(set(plan.workspace_offsets) - scratching):
        raise ValidationError(f"{name!r} has a workspace offset but is no operator with a workspace")


def _check_offsets(problem: Problem, kind: ArrayKind, offsets: Mapping[str, int]) -> None:
    placed = {array.name for array in problem.arrays if array.kind is kind}
    for name in sorted(placed - set(offsets)):
        raise ValidationError(f"{kind} array {name!r} has no offset")
    for name in sorted(set(offsets) - placed):
        raise ValidationError(f"{name!r} has an offset but is no {kind} array of the problem")


def _array_blocks(
    problem: Problem, kind: ArrayKind, offsets: Mapping[str, int], timestep: Mapping[str, int]
) -> list[_Block]:
    at = [timestep[operator.name] for operator in problem.operators]
    blocks = []
    for array in problem.arrays:
        if array.kind is not kind or array.producer is None:
            continue
        first = last = at[array.producer]
        for reader in array.consumers:
            last = max(last, at[reader])
        blocks.append(_Block("array", array.name, first, last + 1, offsets[array.name], array.size_bytes))
    return blocks


def _blocks(problem: Problem, plan: MemoryPlan, timestep: Mapping[str, int]) -> list[_Block]:
    at = [timestep[operator.name] for operator in problem.operators]
    blocks = _array_blocks(problem, ArrayKind.PLANNED, plan.offsets, timestep)
    for operator, first in zip(problem.operators, at, strict=True):
        if operator.workspace_bytes > 0:
            offset, size = plan.workspace_offsets[operator.name], operator.workspace_bytes
            blocks.append(_Block("workspace of operator", operator.name, first, first + 1, offset, size))
    return blocks


def _check_inside(blocks: list[_Block], buffer_bytes: int, buffer: str = "the buffer") -> None:
    for block in blocks:
        if block.offset < 0 or block.offset + block.size > buffer_bytes:
            raise ValidationError(
                f"{block.label} at [{block.offset}, {block.offset + block.size}) B lies outside {buffer} "
                f"of {buffer_bytes} B"
            )


def _check_alignment(arrays: Sequence[Array], kind: ArrayKind, offsets: Mapping[str, int]) -> None:
    for array in arrays:
        if array.kind is kind and offsets[array.name] % array.alignment:
            raise ValidationError(
                f"array {array.name!r} is at offset {offsets[array.name]} B, not a multiple of its "
                f"alignment {array.alignment} B"
            )


def _check_overlaps(blocks: list[_Block]) -> None:
    """Sweep over time, deaths before births at equal times, with live blocks sorted by offset."""
    sized = [block for block in blocks if block.size > 0]
    deaths = iter(sorted(sized, key=attrgetter("upper")))
    next_death = next(deaths, None)
    offsets: list[int] = []
    alive: list[_Block] = []
    for block in sorted(sized, key=attrgetter("lower")):
        while next_death is not None and next_death.upper <= block.lower:
            place = bisect_left(offsets, next_death.offset)
            del offsets[place], alive[place]
            next_death = next(deaths, None)
        # Live blocks are disjoint, so a new one that hits any of them hits a neighbour by offset.
        place = bisect_left(offsets, block.offset)
        if place and offsets[place - 1] + alive[place - 1].size > block.offset:
            raise ValidationError(_collision(alive[place - 1], block))
        if place < len(offsets) and offsets[place] < block.offset + block.size:
            raise ValidationError(_collision(alive[place], block))
        offsets.insert(place, block.offset)
        alive.insert(place, block)


def _collision(first: _Block, other: _Block) -> str:
    return (
        f"{first.label} at [{first.offset}, {first.offset + first.size}) B and {other.label} at "
        f"[{other.offset}, {other.offset + other.size}) B overlap and are both alive at timestep "
        f"{max(first.lower, other.lower)}"
    )


def _check_figures(blocks: list[_Block], plan: MemoryPlan) -> None:
    change = [0] * (len(plan.order) + 1)
    for block in blocks:
        change[block.lower] += block.size
        change[block.upper] -= block.size
    alive, peak = 0, 0
    for difference in change:
        alive += difference
        peak = max(peak, alive)
    if plan.peak_bytes != peak:
        raise ValidationError(f"the plan reports a peak of {plan.peak_bytes} B, but its order has {peak} B")
    if plan.lower_bound_bytes > peak:
        raise ValidationError(
            f"the plan's lower bound of {plan.lower_bound_bytes} B exceeds its order's peak of {peak} B"
        )
