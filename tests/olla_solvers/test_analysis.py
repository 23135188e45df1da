"""Resident sets, lifetimes and ranges on a graph small enough to check by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import (
    Range,
    lifetimes,
    operator_spans,
    peak_bytes,
    precedence_bound,
    preserved_range,
    reachability,
    resident_bytes,
    useful_lifetime,
)
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from tests.olla_solvers.graphs import problems

DIAMOND = Problem(
    (Operator("A"), Operator("B", 5), Operator("C"), Operator("D")),
    (
        Array("a", 10, 0, (1, 2)),
        Array("b", 20, 1, (3,)),
        Array("c", 40, 2, (3,)),
        Array("unread", 7, 2),
        Array("result", 100, 3, (), ArrayKind.OUTPUT),
        Array("weights", 1000, None, (0, 3), ArrayKind.STATIC),
    ),
)


def test_resident_sets() -> None:
    assert resident_bytes(DIAMOND, (0, 1, 2, 3)) == (10, 35, 77, 60)
    assert resident_bytes(DIAMOND, (0, 2, 1, 3)) == (10, 57, 75, 60)
    assert peak_bytes(DIAMOND, (0, 1, 2, 3)) == 77


def test_lifetimes_are_half_open() -> None:
    found = lifetimes(DIAMOND, (0, 1, 2, 3))
    assert found == {"a": Range(0, 3), "b": Range(1, 4), "c": Range(2, 4), "unread": Range(2, 3)}
    assert 2 in found["a"]
    assert 3 not in found["a"]


def test_spans_of_equations_10_to_12() -> None:
    spans = operator_spans(DIAMOND)
    assert spans == (Range(0, 1), Range(1, 3), Range(1, 3), Range(3, 4))
    first, second = DIAMOND.arrays[0], DIAMOND.arrays[1]
    assert useful_lifetime(first, spans) == Range(0, 3)
    assert preserved_range(first, spans) == Range(1, 2)
    assert useful_lifetime(second, spans) == Range(1, 4)
    assert preserved_range(second, spans) == Range(3, 4)
    with pytest.raises(ValueError, match="'weights' has no producer"):
        useful_lifetime(DIAMOND.arrays[5], spans)


def test_reachability_and_bound() -> None:
    above, below = reachability(DIAMOND)
    assert above == [0, 0b1, 0b1, 0b111]
    assert below == [0b1110, 0b1000, 0b1000, 0]
    assert precedence_bound(DIAMOND) == 60


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(5))
def test_ranges_hold_in_every_order(problem: Problem) -> None:
    spans = operator_spans(problem)
    for order in itertools.permutations(range(len(problem.operators))):
        if any(order.index(u) > order.index(v) for u, v in problem.edges):
            continue
        alive = lifetimes(problem, order)
        for operator, span in enumerate(spans):
            assert order.index(operator) in span
        for array in problem.planned:
            useful, surely = useful_lifetime(array, spans), preserved_range(array, spans)
            assert useful.lower <= alive[array.name].lower < alive[array.name].upper <= useful.upper
            assert all(t in alive[array.name] for t in range(surely.lower, surely.upper))
