"""The benchmark of loops that change compares each step with eager's."""

from __future__ import annotations

import pytest
import torch
from loops import measure


@pytest.mark.parametrize(
    ("name", "way"),
    [("DQN", "own"), ("REINFORCE", "own"), ("annealed VAE", "own"), ("annealed VAE", "whole")],
)
def test_a_loop_is_equal_to_eager_and_planned(name: str, way: str) -> None:
    threads = torch.get_num_threads()
    try:
        row = measure(name, way, 6)
    finally:
        torch.set_num_threads(threads)
    assert row["capture_seconds"] > 0
    assert row["planned_share"] == 1 or name != "annealed VAE"


def test_a_loop_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="the losses of step 0 differ"):
        measure("DQN", "own", 1)
