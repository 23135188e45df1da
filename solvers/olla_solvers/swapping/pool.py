"""Gives what a swapped step has on the device its addresses: AutoSwap first, then SmartPool.

Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", sections III-C and V: the
pool depends on the sequence of allocations, to which swapping adds, so it comes second. The largest block is
placed first, into the smallest hole (as in :mod:`olla_solvers.baselines.smartpool`). An array that comes back
from the host is a new block, at another address.

The caller's arrays are in the pool, too. One that is on the device between two steps keeps its address there:
its block is alive at the end of a step and at the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from olla_solvers.arrays import ArrayKind
from olla_solvers.place.greedy import choose_offset
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex
from olla_solvers.swapping.timed_step import TimedStep, alive
from olla_solvers.swapping.transfers import Transfer


@dataclass(frozen=True)
class Pool:
    """Memory for all that is on the device during a step.

    Attributes:
        blocks: of each the spans in which it is alive, two if it goes on from one step to the next, with
            their offset.
        height_bytes: of the pool: the footprint.
    """

    blocks: tuple[tuple[Span, ...], ...]
    height_bytes: Bytes


def smart_pool(step: TimedStep, transfers: Sequence[Transfer] = ()) -> Pool:
    """Place a step's arrays, the caller's included, by SmartPool's best fit.

    Args:
        step: any.
        transfers: its arrays' stays on the host.
    """
    blocks = blocks_of(step, transfers)
    sizes = np.array([spans[0].size_bytes for spans in blocks], dtype=np.int64)
    # A block of one span has it twice.
    lower = np.array([(spans[0].lower, spans[-1].lower) for spans in blocks], dtype=np.int64).reshape(-1, 2)
    upper = np.array([(spans[0].upper, spans[-1].upper) for spans in blocks], dtype=np.int64).reshape(-1, 2)
    bottoms = np.zeros(len(blocks), dtype=np.int64)
    is_placed = np.zeros(len(blocks), dtype=bool)
    for index in sorted(range(len(blocks)), key=lambda index: _largest_first(blocks[index])):
        span = blocks[index][0]
        if span.size_bytes == 0:
            continue
        is_beside = np.zeros(len(blocks), dtype=bool)
        for own_lower, own_upper in zip(lower[index], upper[index], strict=True):
            is_beside |= ((lower < own_upper) & (upper > own_lower)).any(axis=1)
        is_beside &= is_placed
        bottoms[index] = choose_offset(span, bottoms[is_beside], sizes[is_beside], best_fit=True)
        is_placed[index] = True
    placed = tuple(
        tuple(replace(span, offset=int(bottom)) for span in spans)
        for spans, bottom in zip(blocks, bottoms, strict=True)
    )
    return Pool(placed, int((bottoms + sizes).max(initial=0)))


def blocks_of(step: TimedStep, transfers: Sequence[Transfer] = ()) -> list[tuple[Span, ...]]:
    """Return the blocks of a step, each as the spans in which it is alive; they have no offsets.

    Args:
        step: any.
        transfers: its arrays' stays on the host.
    """
    stays: dict[ArrayIndex, list[Transfer]] = {}
    for transfer in transfers:
        stays.setdefault(transfer.array, []).append(transfer)
    blocks: list[tuple[Span, ...]] = []
    for index, (array, accesses) in enumerate(zip(step.problem.arrays, step.accesses, strict=True)):
        first, end = alive(array, accesses, step.length)
        spans = [
            Span(f"{array.name}.{part}", lower, upper, array.size_bytes, array.alignment)
            for part, (lower, upper) in enumerate(_parts(first, end, stays.get(index, ()), step.length))
        ]
        goes_on = array.kind is ArrayKind.STATIC and len(spans) > 1
        if goes_on and spans[0].lower == 0 and spans[-1].upper == step.length:
            blocks.append((spans[0], spans.pop()))
            spans.pop(0)
        blocks += [(span,) for span in spans]
    for timestep, index in enumerate(step.order):
        operator = step.problem.operators[index]
        if operator.workspace_bytes:
            name = f"workspace of {operator.name}"
            blocks.append((Span(name, timestep, timestep + 1, operator.workspace_bytes),))
    return blocks


def _parts(
    first: Timestep, end: Timestep, stays: Sequence[Transfer], length: int
) -> list[tuple[Timestep, Timestep]]:
    """Return the half-open parts of a life in which an array is not on the host."""
    away = []
    for stay in stays:
        past = length if stay.gone_before >= length else 0
        lower, upper = stay.gone_before - past, stay.back_from - past
        away += [(lower, min(upper, length)), (0, max(upper - length, 0))]
    parts = []
    for lower, upper in sorted(away):
        if lower < upper:
            parts.append((first, lower))
            first = upper
    parts.append((first, end))
    return [(lower, upper) for lower, upper in parts if lower < upper]


def _largest_first(spans: Sequence[Span]) -> tuple[int, ...]:
    """Return the key that sorts the largest block first; of equals the one that lives longest."""
    return -spans[0].size_bytes, sum(span.lower - span.upper for span in spans)
