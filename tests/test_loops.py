"""The benchmark of loops that change compares each step with eager's."""

from __future__ import annotations

import pytest
import torch
from loops import measure


@pytest.mark.parametrize(
    ("name", "way", "steps"),
    [
        ("DQN", "own", 6),
        ("REINFORCE", "own", 6),
        ("annealed VAE", "own", 6),
        ("annealed VAE", "whole", 6),
        ("random lengths", "own", 6),
        # Ten lengths, and two of them again.
        pytest.param("bucketed lengths", "own", 12, marks=pytest.mark.slow),
        ("curriculum of images", "own", 6),
        ("curriculum of images", "whole", 6),
        pytest.param("labelled tokens", "own", 6, marks=pytest.mark.slow),
    ],
)
def test_a_loop_is_equal_to_eager_and_planned(name: str, way: str, steps: int) -> None:
    threads = torch.get_num_threads()
    try:
        row = measure(name, way, steps)
    finally:
        torch.set_num_threads(threads)
    assert row["capture_seconds"] > 0
    assert row["planned_share"] == 1 or name in {"DQN", "REINFORCE"}


def test_a_loop_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="the losses of step 0 differ"):
        measure("DQN", "own", 1)
