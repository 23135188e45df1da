"""Sets of operators as Python integers, and what precedes what (OLLA Function 2) for all pairs at once.

Bit u of ``ancestors[v]`` says that u precedes v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from olla_solvers.problem import OperatorIndex


def bits_of(bits: int) -> Iterator[OperatorIndex]:
    """Yield the members of a bitset, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def ancestors(predecessors: Sequence[Sequence[OperatorIndex]], order: Sequence[OperatorIndex]) -> list[int]:
    """Return for each operator the bitset of those that run before it in every order.

    Given successors and a reversed order, these are the descendants.

    Args:
        predecessors: for each operator, those with an edge to it.
        order: any topological order.

    Returns:
        One bitset an operator, itself not included.
    """
    reached = [0] * len(predecessors)
    for operator in order:
        bits = 0
        for predecessor in predecessors[operator]:
            bits |= reached[predecessor] | 1 << predecessor
        reached[operator] = bits
    return reached


def members(bits: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the positions of a bitset's ones, ascending.

    Args:
        bits: the set.
        count: positions there are.

    Returns:
        Indices below ``count``.
    """
    raw = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))
