import pytest
import torch

from olla_fx.models import import_torchvision


def pytest_configure():
    """Import torchvision in a way that suits the installed torch, before another package imports it.

    In the process that collects what workers report, too: it imports the packages that warnings are from.
    """
    import_torchvision()


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
