"""Keeps the captured order of a step's effects and of what may raise, so that a step fails as eager does.

An operator that may raise waits for the effects before it (writes to the caller's tensors, random draws) and
for the one before it that may raise, and later effects wait for it: so whoever catches the error finds what
eager leaves. Effects after the loss, which are those of the update, wait for what makes the step's results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set


def edges_between_effects(
    sources: Sequence[Collection[int]], checks: Set[int], effects: Set[int], delivering: Set[int]
) -> list[tuple[int, int]]:
    """Return what must wait for what, as pairs of operators, the earlier one first.

    Operators are positions in captured order. An edge that others imply is left out.

    Args:
        sources: for each operator, those that it waits for already.
        checks: operators that may raise, up to the last of ``delivering``.
        effects: operators that write to the caller's tensors or draw random numbers.
        delivering: operators that make the step's results.
    """
    last = max(delivering, default=-1)
    noted = checks | delivering | {index for index in effects if index <= last}
    bits = {index: 1 << position for position, index in enumerate(sorted(noted))}
    edges: list[tuple[int, int]] = []
    waits_for: list[int] = []
    since_check: list[int] = []
    check: list[int] = []
    for index, own_sources in enumerate(sources):
        reached = 0
        for source in own_sources:
            reached |= waits_for[source] | bits.get(source, 0)
        wanted: list[int] = []
        if index in checks:
            wanted, since_check = [*check, *since_check], []
        elif index in effects:
            wanted = check if index <= last else [*delivering, *check]
        for source in wanted:
            if not reached & bits[source]:
                edges.append((source, index))
                reached |= waits_for[source] | bits[source]
        waits_for.append(reached)
        if index in checks:
            check = [index]
        elif index in effects and index <= last:
            since_check.append(index)
    return edges
