"""Tests that need a GPU: skipped, saying so, where there is none. Kernels repeat themselves bit for bit."""

import os
from collections.abc import Iterator

import pytest
import torch

from olla_fx.run.pool import buffer_pool

# Read when cuBLAS starts; without it its products may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"torch {torch.__version__} finds no CUDA device here")
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before, warn_only=warned)


@pytest.fixture(autouse=True)
def own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what other tests left from being shared: tests count the blocks of a buffer's size."""
    monkeypatch.setattr(buffer_pool, "_pools", {})


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def without_cudnn() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=False):
        yield
