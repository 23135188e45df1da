"""Threads that copy keep to the speed of a link, and hold on to memory only as long as they copy."""

import contextlib
import gc
import math
import threading
import time
import weakref

import pytest
import torch

from olla_fx.errors import HostMemoryError
from olla_fx.link import HostMemory, Session, engines_for, poison_host_memory
from olla_solvers.swapping.transfers import Link
from tests.olla_fx.transfers import FAST

CPU = torch.device("cpu")
SIZE = 1 << 20


def bytes_of_ones():
    return torch.ones(SIZE, dtype=torch.uint8)


@pytest.mark.parametrize("begin", ["begin_out", "begin_in"])
def test_bytes_are_there_after_the_wait_and_not_before_a_link_brings_them(begin):
    engines = engines_for(CPU, Link(5e6, 5e6, 0.01))
    source, target = bytes_of_ones(), torch.zeros(SIZE, dtype=torch.uint8)
    began = time.perf_counter()
    copy = getattr(engines, begin)(source, target)
    assert not target[-1]
    stalled = copy.wait()
    taken = time.perf_counter() - began
    assert torch.equal(source, target)
    assert taken >= SIZE / 5e6 + 0.01
    assert 0 < stalled <= taken
    assert copy.wait() == 0.0


def test_copies_of_one_direction_come_one_after_the_other_and_directions_beside_each_other():
    engines = engines_for(CPU, Link(4e6, math.inf))
    first, second = (engines.begin_out(bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)) for _ in "ab")
    other = engines.begin_in(bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8))
    other.wait()
    assert not second.done.is_set()
    second.wait()
    assert first.done.is_set()


def test_memory_is_free_when_a_copy_is_done():
    engines = engines_for(CPU, FAST)
    source, target = bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)
    gone = [weakref.ref(source), weakref.ref(target)]
    copy = engines.begin_out(source, target)
    del source, target
    copy.wait()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_sessions_give_memory_back_and_wait_for_what_is_under_way():
    memory, engines = HostMemory(2 * SIZE, CPU), engines_for(CPU, Link(1e7, 1e7))
    session = Session(memory, engines, {0: (0, SIZE), 1: (SIZE, 2 * SIZE)})
    array = torch.ones(SIZE // 4)
    with session.entered():
        host = session.offload(1, array)
    session.close()
    again = Session(memory, engines, {0: (0, SIZE)})
    assert again.offload(0, array).data_ptr() == host.data_ptr() - SIZE
    with pytest.raises(RuntimeError, match="given back"):
        session.offload(0, array)
    again.close()
    poison_host_memory(0xFF)
    assert host.eq(0xFF).all()


def test_sessions_that_are_dropped_end():
    memory, engines = HostMemory(SIZE, CPU), engines_for(CPU, Link(1e7, 1e7))
    session = Session(memory, engines, {0: (0, SIZE)})
    address = session.offload(0, torch.ones(SIZE // 4)).data_ptr()
    del session
    assert memory.take().data_ptr() == address


def test_a_run_that_is_given_up_waits_for_no_link():
    memory, engines = HostMemory(SIZE, CPU), engines_for(CPU, Link(1e3, 1e3))
    began = time.perf_counter()
    for _ in range(2):
        session = Session(memory, engines, {0: (0, SIZE)})
        array = torch.ones(SIZE // 4)
        host = session.offload(0, array)
        session.reload(0, host, array)
        session.close()
        host.fill_(2)
        array.fill_(2)
    time.sleep(0.05)
    assert host.eq(2).all()
    assert array.eq(2).all()
    assert time.perf_counter() - began < 10


def test_the_link_is_free_after_a_copy_that_was_given_up():
    engines = engines_for(CPU, Link(1e5, math.inf))
    source, target = bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)
    engines.begin_out(source, target).drain()
    small = engines.begin_out(source[:100], target[:100])
    assert small.wait() < 5


def test_memory_is_the_hosts_whatever_device_is_the_default():
    with torch.device("meta"):
        assert HostMemory(SIZE, CPU).take().device == CPU


def test_a_session_that_is_dropped_by_a_thread_that_copies_waits_for_nothing():
    """The collector of garbage runs on any thread; one that copies would wait for itself."""
    memory, engines = HostMemory(SIZE, CPU), engines_for(CPU, FAST)
    session, is_asked = Session(memory, engines, {0: (0, SIZE)}), threading.Event()

    class Collecting(torch.Tensor):
        def data_ptr(self):
            is_asked.wait()
            session.close()
            return super().data_ptr()

    first = engines.begin_out(bytes_of_ones().as_subclass(Collecting), torch.empty(SIZE, dtype=torch.uint8))
    host = session.offload(0, torch.ones(SIZE // 4))
    is_asked.set()
    assert first.done.wait(10)
    # The copy goes on, and nobody else gets its memory.
    assert memory.take().data_ptr() != host.data_ptr()
    engines.begin_out(bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)).wait()
    assert torch.equal(host.view(torch.float32), torch.ones(SIZE // 4))


def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have(monkeypatch):
    engines = engines_for(CPU, Link(1e6, 1e6))
    copy = engines.begin_out(bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr("olla_fx.link.engines.os.getpid", lambda: -1)
        assert not copy.drain()
    assert copy.drain()


def test_sessions_belong_to_threads():
    memory, engines = HostMemory(SIZE, CPU), engines_for(CPU, FAST)
    session = Session(memory, engines, {0: (0, SIZE)})
    errors = []

    def look():
        try:
            torch.ops.olla_fx.offload(torch.ones(2), 0)
        except RuntimeError as error:
            errors.append(str(error))

    with session.entered():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    session.close()
    assert "call the step" in errors[0]


def test_a_host_without_memory_is_told(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(HostMemoryError, match=r"no 1\.00 MiB of memory .*: out of memory\. Swap less"):
        HostMemory(SIZE, CPU).take()
    with pytest.raises(HostMemoryError, match="page-locked"):
        HostMemory(SIZE, torch.device("cuda")).take()


class Streams:
    """Stands for CUDA's streams and events, and notes who waits for whom."""

    def __init__(self, monkeypatch):
        self.log, made = [], iter(("out", "in"))
        log = self.log

        class Stream:
            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event):
                log.append(f"{self.name} waits for a copy {event.of}")

        class Event:
            def record(self, stream):
                self.of = stream.name
                log.append(f"copy {stream.name}")

        computing = Stream("computing")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(next(made)))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def test_streams_wait_for_each_other(monkeypatch):
    log = Streams(monkeypatch).log
    engines = engines_for(torch.device("cuda"), FAST)
    source, target = bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)
    out = engines.begin_out(source, target)
    back = engines.begin_in(target, source)
    assert out.wait() == 0.0
    out.drain()
    back.drain()
    assert torch.equal(source, target)
    assert log == [
        "out waits for computing",
        "copy out",
        "in waits for computing",
        "copy in",
        "computing waits for a copy out",
        "computing waits for a copy in",
    ]


def test_streams_keep_memory_until_it_was_waited_for(monkeypatch):
    Streams(monkeypatch)
    engines = engines_for(torch.device("cuda"), FAST)
    source, target = bytes_of_ones(), torch.empty(SIZE, dtype=torch.uint8)
    gone = [weakref.ref(source), weakref.ref(target)]
    copy = engines.begin_in(source, target)
    del source, target
    assert all(reference() is not None for reference in gone)
    copy.wait()
    assert [reference() for reference in gone] == [None, None]
