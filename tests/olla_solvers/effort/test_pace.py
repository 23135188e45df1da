"""Limits in processor time are longer by the clock on a machine that others use, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from olla_solvers.effort import pace


@pytest.mark.parametrize(
    ("clock", "own", "children", "expected"),
    [
        (5.0, 5.0, 0.0, 10.0),
        (6.0, 2.0, 1.0, 20.0),
        (60.0, 1.0, 0.0, 40.0),
        (1.0, 3.0, 0.0, 10.0),
        (9.0, 0.0, 0.0, 10.0),
    ],
)
def test_the_clock_runs_ahead(
    clock: float, own: float, children: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(clock=100.0, user=7.0, system=0.0, children_user=3.0, children_system=0.0)
    monkeypatch.setattr(pace.time, "monotonic", lambda: now.clock)
    monkeypatch.setattr(pace.os, "times", lambda: now)
    watched = pace.Pace()
    now.clock += clock
    now.user += own
    now.children_user += children
    assert watched.by_the_clock(10.0, most=4.0) == pytest.approx(expected)
