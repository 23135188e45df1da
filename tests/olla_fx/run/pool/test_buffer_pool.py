"""A pool holds what its plans need at the same time: it grows, shrinks, and never takes what a run holds."""

import threading

import pytest
import torch

from olla_fx import arena
from olla_fx.run.pool import Turn, Way, pool_of


class Owner:
    """Whoever has a plan."""

    def __init__(self, buffer_bytes):
        pool().want(self, buffer_bytes)


def pool():
    return pool_of(torch.device("cpu"))


def hold(owner):
    lease = Turn().lease(wait=False)
    table(owner, lease)
    return lease


def table(owner, lease):
    return lease.arena(pool(), owner, lambda buffer, base: arena.Arena(buffer, 0, [], base))


def run_beside(outer, inner, held_bytes):
    """Run one plan three times while another one waits."""
    for _ in range(3):
        lease = hold(outer)
        lease.wait(lambda: (0, held_bytes))
        run_alone(inner)
        assert lease.resume() is Way.FREE
        lease.release()


def run_alone(owner):
    lease = hold(owner)
    try:
        return table(owner, lease).buffer.address
    finally:
        lease.release()


def test_plans_in_turn_share_the_largest_segment(buffers):
    owners = [Owner(1024), Owner(8192), Owner(4096)]
    for owner in owners * 3:
        run_alone(owner)
    assert buffers.sizes() == [8192]
    assert buffers.made == 2
    # The small segment was gone before the large one came.
    assert buffers.most_bytes == 8192


def test_a_plan_that_is_gone_gives_back(buffers):
    small, large = Owner(1024), Owner(8192)
    run_alone(large)
    run_alone(small)
    del large
    assert buffers.sizes() == []
    run_alone(small)
    assert buffers.sizes() == [1024]
    pool().want(small, 512)
    assert buffers.sizes() == []


def test_what_a_run_holds_stays(buffers):
    small, large = Owner(1024), Owner(8192)
    run_alone(large)
    lease = hold(small)
    held = table(small, lease)
    del large
    run_alone(Owner(16384))
    assert held.buffer.buffer_bytes == 8192
    assert table(small, lease) is held
    del held
    lease.release()
    assert buffers.sizes() == []


def test_plans_that_overlap_have_segments_of_their_own_size(buffers):
    """A generator ran in the segment of the discriminator that it runs together with in the next call."""
    alone, outer, inner = Owner(8192), Owner(1024), Owner(8192)
    for _ in range(4):
        run_alone(alone)
        lease = hold(outer)
        run_alone(inner)
        lease.release()
    assert buffers.sizes() == [1024, 8192]
    made = buffers.made
    other = Owner(2048)
    for owner in (alone, inner, outer, other) * 3:
        run_alone(owner)
    assert buffers.made == made


def test_runs_that_are_recorded_count_as_overlapping(buffers):
    outer, inner = Owner(1024), Owner(8192)
    lease = Turn().lease(wait=False)
    lease.attend(pool(), outer)
    run_alone(inner)
    lease.release()
    lease = hold(outer)
    run_alone(inner)
    lease.release()
    assert buffers.sizes() == [1024, 8192]
    assert buffers.made == 2


def test_a_dropped_lease_gives_back(buffers):
    owner = Owner(1024)
    lease = hold(owner)
    del owner
    run_alone(Owner(512))
    assert buffers.sizes() == [1024]
    del lease
    assert buffers.sizes() == []


def test_one_lease_for_several_plans(buffers):
    small, large = Owner(1024), Owner(8192)
    lease = Turn().lease(wait=False)
    for owner in (small, large) * 2:
        assert table(owner, lease).buffer.buffer_bytes >= pool()._sharing.wanted[owner]
    lent = lease.lend()
    assert table(large, lent) is table(large, lease)
    lent.release()
    assert table(large, lent) is table(large, lease)
    assert buffers.sizes() == [8192]
    lease.release()


def test_releases_while_the_pool_is_locked(buffers, monkeypatch):
    """The garbage collector may end claims and plans at any allocation, in the pool itself, too."""
    owners = [Owner(size) for size in (1024, 2048, 4096)]
    leases = [hold(owner) for owner in owners]
    make = arena.Buffer

    def collect_and_make(*arguments):
        leases.clear()
        owners.clear()
        return make(*arguments)

    monkeypatch.setattr(arena, "Buffer", collect_and_make)
    last = Owner(8192)
    lease = hold(last)
    assert buffers.sizes() == [8192]
    lease.release()


def test_a_segment_with_a_block_that_is_alive_is_left_alone(buffers):
    owner = Owner(1024)
    lease = hold(owner)
    table_of_one = arena.Arena(table(owner, lease).buffer, 1, [arena.PlannedRequest(0, 0, 400, 0)])
    with table_of_one.region():
        table_of_one.begin_operator(0)
        kept = torch.full((100,), 7.0)
    address = table_of_one.buffer.address
    del table_of_one
    lease.release()
    assert run_alone(owner) != address
    assert torch.equal(kept, torch.full((100,), 7.0))
    assert buffers.sizes() == [1024]


def test_a_plan_that_does_not_fit_keeps_no_smaller_one_from_running(buffers):
    buffers.limit_bytes = 4096
    small, large = Owner(1024), Owner(8192)
    run_alone(small)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no more than 4096 B"):
            run_alone(large)
        # All that was idle was given up for it.
        assert buffers.sizes() == []
        run_alone(small)


def test_random_runs_hold_what_they_claimed(buffers):
    generator = torch.Generator().manual_seed(3)

    def draw(count):
        return int(torch.randint(count, (), generator=generator))

    owners = {index: Owner(64 * (1 + draw(100))) for index in range(8)}
    held = {}
    for _ in range(2000):
        lease = buffer = None
        index = draw(8)
        if index in held:
            lease, address = held.pop(index)
            assert table(owners[index], lease).buffer.address == address
            lease.release()
        elif draw(5) == 0:
            owners[index] = Owner(64 * (1 + draw(100)))
        else:
            lease = hold(owners[index])
            buffer = table(owners[index], lease).buffer
            assert buffer.buffer_bytes >= pool()._sharing.wanted[owners[index]]
            assert buffer.address not in [address for _, address in held.values()]
            held[index] = lease, buffer.address
    lease = buffer = None
    held.clear()
    owners.clear()
    assert buffers.sizes() == []


def test_a_plan_runs_in_what_a_waiting_run_does_not_hold(buffers):
    outer, inner = Owner(4096), Owner(2048)
    run_beside(outer, inner, 1000)
    assert buffers.sizes() == [4096]
    assert buffers.made == 1


def test_a_segment_grows_to_hold_what_waits_and_what_runs(buffers):
    outer, inner = Owner(4096), Owner(3968)
    run_beside(outer, inner, 1000)
    # From the next multiple of 64 B on.
    assert buffers.sizes() == [1024 + 3968]
    # Of no use any more once the plan that waited is another.
    pool().want(outer, 2048)
    assert buffers.sizes() == []


def test_runs_that_wait_crosswise_are_kept_apart(buffers):
    first, second = Owner(4096), Owner(3072)
    for turn in range(3):
        leases = [hold(first)]
        leases[0].wait(lambda: (0, 1024))
        leases.append(hold(second))
        leases[1].wait(lambda: (0, 1024))
        # Only the first time is the second's in the way of the first.
        assert leases[0].resume() is (Way.FREE if turn else Way.TAKEN)
        leases[0].release()
        assert leases[1].resume() is Way.FREE
        leases[1].release()
    assert buffers.sizes() == [3072, 4096]


def test_of_two_runs_that_go_on_at_the_same_time_one_has_the_segment(buffers):
    owners, leases = [Owner(4096), Owner(1024)], []
    for owner in owners:
        leases.append(hold(owner))
        leases[-1].wait(lambda: (0, 512))
    ways = []
    thread = threading.Thread(target=lambda: ways.append(leases[1].resume()))
    thread.start()
    thread.join()
    ways.append(leases[0].resume())
    assert ways == [Way.FREE, Way.BUSY]
    leases.reverse()
    for lease in leases:
        lease.release()


def test_a_run_of_another_thread_does_not_share_with_one_that_waits(buffers):
    outer, inner = Owner(4096), Owner(2048)
    lease = hold(outer)
    lease.wait(lambda: (0, 1024))
    thread = threading.Thread(target=run_alone, args=(inner,))
    thread.start()
    thread.join()
    assert buffers.sizes() == [2048, 4096]
    lease.release()


def test_a_segment_shrinks_when_the_plan_that_waited_is_gone(buffers):
    outer, inner = Owner(1 << 20), Owner(4096)
    run_beside(outer, inner, 1 << 20)
    assert buffers.sizes() == [(1 << 20) + 4096]
    del outer
    run_alone(inner)
    assert buffers.sizes() == [4096]


def test_many_plans_that_wait_settle_at_once(buffers):
    owners = [Owner(4096) for _ in range(20)]
    for _ in range(3):
        leases = []
        for owner in owners:
            leases.append(hold(owner))
            leases[-1].wait(lambda: (0, 1024))
        for lease in reversed(leases):
            lease.resume()
            lease.release()
    assert buffers.sizes() == [19 * 1024 + 4096]
    # The first time one each, and then one for all.
    assert buffers.made == 21


def test_a_run_that_wants_to_be_alone_shares_with_none_that_waits(buffers):
    outer, graphed = Owner(4096), Owner(1024)
    lease = hold(outer)
    lease.wait(lambda: (0, 512))
    other = Turn().lease(wait=False)
    alone = other.arena(pool(), graphed, lambda buffer, base: arena.Arena(buffer, 0, [], base), alone=True)
    assert alone.buffer.address != table(outer, lease).buffer.address
    other.release()
    lease.release()
