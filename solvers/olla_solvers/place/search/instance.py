"""Prepares spans for compiled code: sections, fixed blocks, twins.

Spans with a given offset become blocks: they forbid ranges of offsets to the arrays alive with them and take
room in their sections. Spans without bytes collide with nothing and are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.place.search.layout import Instance, Ints
from olla_solvers.place.search.rules import SearchRules
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes


@dataclass(frozen=True)
class Prepared:
    """An instance in bytes, arrays numbered from 0.

    Attributes:
        spans: for each array the index of its span.
        lower: for each array its first timestep.
        upper: for each array the end of its lifetime.
        twin_class: for each array a number shared by identical ones.
        low: for each array the lowest offset that fixed blocks allow.
        sections: number of sections.
        contradictory: True if fixed blocks collide, or a given span ends above the capacity.
        instance: the kernel's view, in which no array has a twin yet.
    """

    spans: Ints
    lower: Ints
    upper: Ints
    twin_class: Ints
    low: Ints
    sections: int
    contradictory: bool
    instance: Instance

    def ranked(self, rank: Ints) -> Instance:
        """Return the kernel's view with twins chained by rank."""
        order = np.lexsort([rank, self.twin_class])
        same = self.twin_class[order][1:] == self.twin_class[order][:-1]
        twin = np.full(len(order), -1, dtype=np.int64)
        twin[order[1:][same]] = order[:-1][same]
        return self.instance._replace(twin=twin)


def prepare(spans: Sequence[Span], capacity_bytes: Bytes, rules: SearchRules) -> Prepared:
    """Number the arrays and sections of spans.

    Args:
        spans: checked spans.
        capacity_bytes: room for all.
        rules: of which ``maximal_sections`` matters here.

    Returns:
        The prepared instance.
    """
    sized = [index for index, span in enumerate(spans) if span.size_bytes > 0]
    lower = np.array([spans[index].lower for index in sized], dtype=np.int64)
    upper = np.array([spans[index].upper for index in sized], dtype=np.int64)
    first, last, sections = _sections(lower, upper, rules.maximal_sections)
    free = np.array([spans[index].offset is None for index in sized], dtype=bool)
    blocks = []
    for position in np.flatnonzero(~free):
        span = spans[sized[position]]
        blocks.append((int(first[position]), int(last[position]), span.offset or 0, span.size_bytes))
    numbers = np.array(sized, dtype=np.int64)[free]
    arrays = [spans[index] for index in numbers]
    size = np.array([span.size_bytes for span in arrays], dtype=np.int64)
    alignment = np.array([span.alignment for span in arrays], dtype=np.int64)
    first, last = first[free], last[free]
    block, block_low, block_high, collision = _blocks_of_sections(blocks, sections)
    gap, gap_low, gap_high = _gaps(blocks, first, last, size)
    tops = [span.offset + span.size_bytes for span in spans if span.offset is not None]
    return Prepared(
        spans=numbers,
        lower=lower[free],
        upper=upper[free],
        twin_class=_classes(first, last, size, alignment),
        low=_lows(alignment, gap, gap_low, gap_high),
        sections=sections,
        contradictory=collision or any(top > capacity_bytes for top in tops),
        instance=Instance(
            first=first,
            last=last,
            size=size,
            alignment=alignment,
            twin=np.full(len(size), -1, dtype=np.int64),
            gap=gap,
            gap_low=gap_low,
            gap_high=gap_high,
            block=block,
            block_low=block_low,
            block_high=block_high,
            capacity=capacity_bytes,
        ),
    )


def _sections(lower: Ints, upper: Ints, maximal: bool) -> tuple[Ints, Ints, int]:
    """Return for each span its first section and the one after its last, and the number of sections.

    Deaths come before births at equal times. With ``maximal`` a section ends at a death that follows a birth,
    else at every time with a death or birth.
    """
    count = len(lower)
    if count == 0:
        return lower, upper, 0
    if not maximal:
        times = np.unique(np.concatenate([lower, upper]))
        return np.searchsorted(times, lower), np.searchsorted(times, upper), len(times) - 1
    moment = np.concatenate([upper, lower])
    birth = np.repeat([0, 1], count)
    order = np.lexsort((birth, moment))
    kind = birth[order]
    closes = np.zeros(2 * count, dtype=np.int64)
    closes[1:] = (kind[1:] == 0) & (kind[:-1] == 1)
    section = np.empty(2 * count, dtype=np.int64)
    section[order] = np.cumsum(closes)
    return section[count:], section[:count], int(closes.sum())


def _blocks_of_sections(
    blocks: Sequence[tuple[int, int, int, int]], sections: int
) -> tuple[Ints, Ints, Ints, bool]:
    """Return the fixed blocks by section, and True if two of them collide."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(sections)]
    for first, last, low, size_bytes in blocks:
        for section in range(first, last):
            ranges[section].append((low, low + size_bytes))
    collision = False
    for blocks_of_section in ranges:
        blocks_of_section.sort()
        collision = collision or any(a[1] > b[0] for a, b in itertools.pairwise(blocks_of_section))
    return (*_flat(ranges), collision)


def _gaps(
    blocks: Sequence[tuple[int, int, int, int]], first: Ints, last: Ints, size: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return for each array the offsets at which it would hit a fixed block, as ascending ranges."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(len(first))]
    for block_first, block_last, low, size_bytes in blocks:
        for array in np.flatnonzero((first < block_last) & (last > block_first)):
            ranges[array].append((low - int(size[array]) + 1, low + size_bytes))
    for ranges_of_array in ranges:
        ranges_of_array.sort()
    return _flat(ranges)


def _flat(ranges: Sequence[Sequence[tuple[int, int]]]) -> tuple[Ints, Ints, Ints]:
    """Return lists of pairs as one pair of arrays, after the position at which each list begins."""
    start = np.zeros(len(ranges) + 1, dtype=np.int64)
    start[1:] = np.cumsum([len(pairs) for pairs in ranges])
    low = np.array([low for pairs in ranges for low, _ in pairs], dtype=np.int64)
    high = np.array([high for pairs in ranges for _, high in pairs], dtype=np.int64)
    return start, low, high


def _lows(alignment: Ints, gap: Ints, gap_low: Ints, gap_high: Ints) -> Ints:
    """Return for each array the lowest aligned offset that hits no fixed block."""
    low = np.zeros(len(alignment), dtype=np.int64)
    for array in np.flatnonzero(gap[1:] > gap[:-1]):
        offset, step = 0, int(alignment[array])
        for index in range(int(gap[array]), int(gap[array + 1])):
            if gap_low[index] <= offset < gap_high[index]:
                offset = -(-int(gap_high[index]) // step) * step
        low[array] = offset
    return low


def _classes(first: Ints, last: Ints, size: Ints, alignment: Ints) -> Ints:
    """Return a number for each array, the same for arrays that the search cannot tell apart."""
    if len(first) == 0:
        return first
    keys = np.stack([first, last, size, alignment])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
