"""A memory budget as users say it: bytes, text with a unit, a share."""

import pytest

from olla_fx import Options
from olla_fx.memory_budget import MemoryBudget
from olla_fx.options import RECOMPUTE, changed_options
from olla_solvers.errors import OptionError


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        (8 << 30, 8 << 30),
        (8e9, 8 * 10**9),
        (1, 1),
        ("8GiB", 8 << 30),
        (" 1.5 gib ", 3 << 29),
        ("500MB", 500 * 10**6),
        ("500M", 500 << 20),
        ("1e3", 1000),
        ("4096", 4096),
        ("4096 B", 4096),
    ],
)
def test_bytes(given, size_bytes):
    assert MemoryBudget.of(given) == MemoryBudget(size_bytes=size_bytes)
    assert MemoryBudget.of(given).in_bytes(7) == size_bytes


@pytest.mark.parametrize(
    ("given", "share"),
    [(0.6, 0.6), ("60%", 0.6), ("62.5 %", 0.625), (1.0, 1.0), ("0.6", 0.6), (" .6 ", 0.6), ("1.0", 1.0)],
)
def test_shares(given, share):
    assert MemoryBudget.of(given) == MemoryBudget(share=share)
    assert MemoryBudget.of(given).in_bytes(1001) == int(1001 * share)


@pytest.mark.parametrize(
    "given",
    [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "", "lots", "0", "0.0", "1.5", "0%", "120%",
     "8 GiBs", "-8GiB", "8 GiB 2", "1e999", "1e999GiB", "1e999 lots", "1e999%", [8], b"8"],
)  # fmt: skip
def test_what_is_none_of_these_is_refused(given):
    with pytest.raises(OptionError, match="memory_budget is bytes above 0"):
        Options(memory_budget=given)


def test_a_budget_says_how_much_time_may_be_spent():
    with pytest.raises(OptionError, match="give one of them"):
        Options(memory_budget="8GiB", recompute=0.01)
    with pytest.raises(OptionError, match="give one of them"):
        changed_options(Options(recompute=0), {"memory_budget": 0.5})
    assert changed_options(Options(), {"memory_budget": 0.5}).may_recompute
    assert Options().recompute_share == RECOMPUTE
    assert not Options(recompute=0).may_recompute


def test_what_counts_in_a_budget():
    assert Options(memory_budget=0.5, memory_budget_includes="static").memory_budget_includes == "static"
    with pytest.raises(OptionError, match="memory_budget_includes is 'static' or None, not 'all'"):
        Options(memory_budget=0.5, memory_budget_includes="all")
    with pytest.raises(OptionError, match="which is not given"):
        Options(memory_budget_includes="static")
