"""The one buffer of several plans is as large as the largest, on a device with little memory, too."""

import pytest
import torch

from olla_fx import arena
from olla_fx.run.shared_buffer import SharedBuffer

CPU = torch.device("cpu")


class Owner:
    """Whoever has a plan."""


@pytest.fixture
def little_memory(monkeypatch):
    make_buffer = arena.Buffer

    def make(buffer_bytes, device):
        if buffer_bytes > 4096:
            raise MemoryError("no more than 4096 B are there")
        return make_buffer(buffer_bytes, device)

    monkeypatch.setattr(arena, "Buffer", make)


def table_bytes(shared, owner):
    return shared.arena(owner, CPU, lambda buffer: arena.Arena(buffer, 0, [])).buffer.buffer_bytes


def test_the_largest_plan_gives_the_size():
    shared, small, large = SharedBuffer(), Owner(), Owner()
    shared.want(small, 1024)
    shared.want(large, 8192)
    assert [table_bytes(shared, owner) for owner in (small, large, small)] == [8192] * 3
    del large
    assert table_bytes(shared, small) == 1024


def test_a_plan_that_does_not_fit_keeps_no_smaller_one_from_running(little_memory):
    shared, small, large = SharedBuffer(), Owner(), Owner()
    shared.want(small, 1024)
    assert table_bytes(shared, small) == 1024
    shared.want(large, 8192)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no more than 4096 B"):
            table_bytes(shared, large)
        assert table_bytes(shared, small) == 1024
    table = shared.arena(small, CPU, lambda buffer: arena.Arena(buffer, 0, []))
    assert shared.arena(small, CPU, lambda buffer: arena.Arena(buffer, 0, [])) is table
