import pytest
import torch


@pytest.fixture(autouse=True)
def _no_cached_plans(monkeypatch):
    """Every test plans for itself; tests of the cache choose a folder."""
    monkeypatch.setenv("OLLA_FX_CACHE_DIR", "")


@pytest.fixture(autouse=True)
def _one_seed_and_one_thread():
    """Every test starts from the same random state, and leaves the number of threads as it was.

    One thread, since workers of the test run would otherwise fight for the cores; tests that are about
    several threads ask for them.
    """
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
