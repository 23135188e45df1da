"""Who is served when several threads allocate and free."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from olla_fx.arena import Arena, Buffer, PlannedRequest, record_events
from olla_fx.errors import ArenaBusyError


def run_on_another_thread(action: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_other_threads_are_counted_apart_and_never_served() -> None:
    arena = Arena(Buffer(512), 1, [PlannedRequest(0, 0, 400, 0)])
    kept: list[torch.Tensor] = []
    with arena.region(record=True):
        arena.begin_operator(0)
        run_on_another_thread(lambda: kept.extend(torch.empty(100) for _ in range(5)))
        tensor = torch.empty(100)
    assert not any(arena.buffer.contains(other.data_ptr()) for other in kept)
    assert arena.buffer.contains(tensor.data_ptr())
    counters = arena.counts()
    assert (counters.requests_on_worker_threads, counters.outside, counters.served) == (5, 0, 1)
    assert len(arena.recording()) == 1


def test_a_busy_arena_refuses_another_thread() -> None:
    arena = Arena(Buffer(512), 1, [])

    def enter() -> None:
        assert arena.is_busy
        with arena.region():
            pass

    with arena.region(), pytest.raises(ArenaBusyError):
        run_on_another_thread(enter)
    assert not arena.is_busy


def test_a_served_block_may_be_freed_by_another_thread() -> None:
    arena = Arena(Buffer(512), 2, [PlannedRequest(0, 0, 400, 0), PlannedRequest(1, 0, 400, 0)])
    kept: list[torch.Tensor] = []
    with arena.region(record=True):
        arena.begin_operator(0)
        kept.append(torch.empty(100))
        run_on_another_thread(kept.clear)
        arena.begin_operator(1)
        kept.append(torch.empty(100))
    first, second = arena.recording()
    assert first.freed_by_other_thread
    assert first.freed_in_operator == 0
    assert second.freed_at is None
    assert arena.buffer.outstanding_blocks == 1
    run_on_another_thread(kept.clear)
    assert arena.buffer.outstanding_blocks == 0


def test_two_threads_run_their_own_arenas() -> None:
    failures: list[str] = []

    def work(value: float) -> None:
        arena = Arena(Buffer(4096), 1, [PlannedRequest(0, 0, 4000, 0)])
        for _ in range(300):
            with arena.region():
                arena.begin_operator(0)
                block = torch.full((1000,), value)
            if not arena.buffer.contains(block.data_ptr()) or not bool((block == value).all()):
                failures.append(f"thread {value}")
            if arena.counts().served != 1:
                failures.append(f"thread {value} counts {arena.counts()}")
            del block

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_attention_backward_in_bf16_keeps_its_gradients(two_threads: None) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 96, 32, dtype=torch.bfloat16, requires_grad=True)

    def gradient() -> torch.Tensor:
        attended = functional.scaled_dot_product_attention(query, query, query)
        return torch.autograd.grad(attended.float().square().sum(), query)[0]

    recorder = Arena(Buffer(0), 1, [])
    expected = gradient()
    with recorder.region(record=True):
        recorder.begin_operator(0)
        gradient()
    recording = recorder.recording()
    requests, end = [], 0
    for request in recording:
        requests.append(PlannedRequest(0, request.ordinal, request.size_bytes, end))
        end += -(-request.size_bytes // 64) * 64
    arena = Arena(Buffer(end), 1, requests)
    for _ in range(5):
        arena.buffer.poison()
        with arena.region():
            arena.begin_operator(0)
            given = gradient()
        assert torch.equal(given, expected)
        del given  # what is alive keeps its place
        assert arena.counts().served == len(recording)
        assert arena.counts().outside == 0


def test_random_requests_and_frees_on_three_threads_keep_every_block_intact() -> None:
    """Blocks hold a pattern of their own; any that is served twice at once or freed wrongly loses it."""
    count = 64
    requests = [PlannedRequest(operator, 0, 128 * 8, operator * 1024) for operator in range(count)]
    stop = threading.Event()
    failures: list[str] = []

    def outsider(seed: int, inbox: list[torch.Tensor]) -> None:
        chooser = random.Random(seed)
        live: list[tuple[torch.Tensor, int]] = []
        while not stop.is_set():
            value = chooser.randrange(1, 1000)
            live.append((torch.full((chooser.randrange(1, 3000),), value), value))
            while len(live) > 40:
                block, expected = live.pop(chooser.randrange(len(live)))
                if not bool((block == expected).all()):
                    failures.append("a stock block was overwritten")
            while inbox:
                inbox.pop()

    inbox: list[torch.Tensor] = []
    threads = [threading.Thread(target=outsider, args=(seed, inbox)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        chooser = random.Random(7)
        for turn in range(150):
            arena = Arena(Buffer(count * 1024), count, requests)
            leaked = serve_everything(arena, chooser, record=turn % 3 == 0, failures=failures)
            inbox.extend(leaked)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def serve_everything(
    arena: Arena, chooser: random.Random, *, record: bool, failures: list[str]
) -> list[torch.Tensor]:
    live: list[tuple[torch.Tensor, int]] = []
    with arena.region(record=record):
        for operator in range(64):
            arena.begin_operator(operator)
            matches = chooser.random() < 0.8
            live.append((torch.full((128 if matches else 77,), operator), operator))
            if chooser.random() < 0.5:
                live.pop(chooser.randrange(len(live)))
    if arena.counts().served < 32:
        failures.append(f"the arena served {arena.counts().served} of 64 requests")
    for block, expected in live:
        if not bool((block == expected).all()):
            failures.append("a served block was overwritten")
    return [block for block, _ in live]


def allocate_and_free() -> None:
    torch.empty(50)


def test_events_cover_all_threads_and_ignore_older_blocks() -> None:
    old = torch.empty(1000)
    with record_events() as recording:
        del old
        tensor = torch.empty(100)
        run_on_another_thread(allocate_and_free)
        del tensor
        kept = torch.empty(25)
    with pytest.raises(ArenaBusyError), record_events(), record_events():
        pass
    sizes = {(event.kind.value, event.block): event.size_bytes for event in recording.events}
    ours = [event for event in recording.events if event.on_planning_thread]
    others = [event for event in recording.events if not event.on_planning_thread]
    assert [(event.kind.value, event.size_bytes) for event in ours] == [
        ("alloc", 400),
        ("free", 400),
        ("alloc", 100),
    ]
    assert [(event.kind.value, event.size_bytes) for event in others] == [("alloc", 200), ("free", 200)]
    assert len(sizes) == 5
    assert kept.numel() == 25


def test_events_tell_served_blocks_from_the_stock_allocators() -> None:
    arena = Arena(Buffer(1024), 1, [PlannedRequest(0, 0, 400, 0)])
    with record_events() as recording, arena.region():
        arena.begin_operator(0)
        served = torch.empty(100)
        beside = torch.empty(100)
        del served, beside
    assert [(event.kind.value, event.served) for event in recording.events] == [
        ("alloc", True),
        ("alloc", False),
        ("free", True),
        ("free", False),
    ]
