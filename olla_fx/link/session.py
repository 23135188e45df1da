"""What one run of a step has on the host, and the copies that are under way for it.

The operators of a graph know a transfer by its number; where its bytes wait is planned, after the graph was
written. So they ask the session of the run that they are a part of, which its thread has entered.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping

import torch

from olla_fx.link.engines import CopyEngines, CopyUnderWay
from olla_fx.link.host_memory import HostMemory

_threads = threading.local()


def current_session() -> Session:
    """Return the session of the run that the calling thread is in.

    Raises:
        RuntimeError: outside of runs.
    """
    session: Session | None = getattr(_threads, "session", None)
    if session is None:
        raise RuntimeError(
            "this graph swaps arrays to the host, and runs as a part of its planned step alone: call the step"
        )
    return session


class Session:
    """The transfers of one run.

    Attributes:
        stalled_seconds: for which operators waited for copies so far, on a CPU; on CUDA streams wait, of
            which the host does not know.
    """

    def __init__(
        self, memory: HostMemory, engines: CopyEngines, places: Mapping[int, tuple[int, int]]
    ) -> None:
        """Begin a run.

        Args:
            memory: has the buffer.
            engines: copy.
            places: first byte and end in the buffer, by the transfers' numbers.

        Raises:
            HostMemoryError: if there is not enough memory.
        """
        self.stalled_seconds = 0.0
        self._memory = memory
        self._engines = engines
        self._places = places
        self._out: dict[int, CopyUnderWay] = {}
        self._in: dict[int, CopyUnderWay] = {}
        self._buffer: torch.Tensor | None = None
        self._buffer = memory.take()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the operators that the calling thread runs act on this session."""
        before = getattr(_threads, "session", None)
        _threads.session = self
        try:
            yield
        finally:
            _threads.session = before

    def offload(self, transfer: int, array: torch.Tensor) -> torch.Tensor:
        """Begin to copy the storage of an array to its place; return the bytes there."""
        if self._buffer is None:
            raise RuntimeError("the run is over, and its memory on the host is given back")
        first, end = self._places[transfer]
        # A kernel may have asked for more than its result has.
        source = bytes_of(array)[: end - first]
        host = self._buffer[first : first + source.numel()]
        self._out[transfer] = self._engines.begin_out(source, host)
        return host

    def reload(self, transfer: int, host: torch.Tensor, array: torch.Tensor) -> None:
        """Begin to copy bytes on the host into an array."""
        self._in[transfer] = self._engines.begin_in(host, bytes_of(array))

    def wait_out(self, transfer: int) -> None:
        """Let what computes wait until a transfer's copy to the host is done."""
        self.stalled_seconds += self._out[transfer].wait()

    def wait_in(self, transfer: int) -> None:
        """Let what computes wait until a transfer's copy to the device is done."""
        self.stalled_seconds += self._in[transfer].wait()

    def close(self) -> None:
        """End the run: no copy is under way afterwards, and the memory on the host serves another run.

        A copy that goes on all the same, since nobody can wait for it here, keeps its memory as long as that.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            are_over = [copy.drain() for copy in (*self._out.values(), *self._in.values())]
            if all(are_over):
                self._memory.give_back(buffer)

    def __del__(self) -> None:
        """End a run that was dropped between two phases, unless threads that copy have ended before."""
        if not sys.is_finalizing():
            self.close()


def bytes_of(array: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the storage that an array, or a view of it, lies in."""
    return torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())
