"""Resident sets and lifetimes on a graph small enough to check by hand."""

from __future__ import annotations

from olla_solvers.analysis import (
    Range,
    lifetimes,
    peak_bytes,
    resident_bytes,
)
from olla_solvers.graph.flow import flow_of
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from tests.olla_solvers.graphs import precedence_bound

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
    alive = lifetimes(DIAMOND, (0, 1, 2, 3))
    assert alive == {"a": Range(0, 3), "b": Range(1, 4), "c": Range(2, 4), "unread": Range(2, 3)}
    assert 2 in alive["a"]
    assert 3 not in alive["a"]


def test_the_precedence_bound_counts_what_is_alive_in_every_order() -> None:
    assert precedence_bound(DIAMOND) == 60
    assert max(flow_of(DIAMOND)[0].precedence_bytes) == 60
