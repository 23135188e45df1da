"""The benchmark of the DQN planner gives all planners one step, and shows their figures."""

from __future__ import annotations

import dqn
import pytest

from olla_solvers.swapping.transfers import Link
from tests.olla_solvers.recomputation.steps import chain


@pytest.fixture(scope="module")
def figures() -> dict:
    return dqn.measure(chain(12, (1.0, 3.0)), Link(10.0, 10.0), seconds=0.5)


def test_all_planners_get_the_same_limits(figures):
    assert figures["peak_bytes"] == 130
    assert set(figures["points"]) >= {"DQN", "DQN, swap only", "Chen"}
    for points in figures["points"].values():
        assert len(points) == len(dqn.SHARES)
        for point, share in zip(points, dqn.SHARES, strict=True):
            assert point is None or point[0] <= share
    assert all(point is not None for point in figures["points"]["DQN"])


def test_what_was_learned_on_one_step_is_used_on_another():
    figures = dqn.transferred(chain(6), chain(10), Link(10.0, 10.0), seconds=0.5)
    assert len(figures["untaught"]) == 5
    assert figures["learned anew"] is not None
    assert figures["tuned"] is not None


def test_tables_and_plot_show_all_of_it(figures, tmp_path):
    results = {
        "chain": figures,
        "transfers": {
            "a, b": {"untaught": [0.1, None, 0.3], "as it is": 0.2, "tuned": None, "learned anew": 0}
        },
    }
    shown = dqn.tables(results)
    assert "| chain | DQN | " in shown
    assert "| a, b | 30.0 | 20.0 | - | 0.0 |" in shown
    dqn.plot(results, tmp_path / "dqn.png")
    assert (tmp_path / "dqn.png").stat().st_size > 1000
