"""What tests of rewrites share."""

import pytest

from olla_fx.passes.rewrites import loss_gradients


@pytest.fixture
def small_parts(monkeypatch):
    """Rewrite small losses, too."""
    monkeypatch.setattr(loss_gradients, "LEAST_PART_BYTES", 4096)
