"""Measures what kinds of operators take on the machine at hand, each on its own, on numbers of our own.

The kinds on which a step spends most, by what is known of them, come first, and no more is begun than fits
into the time that is given. Of a kind one run warms up, and the median of a few counts.

On a CPU results and workspaces lie in a buffer that was written before, as they will in the planned step: in
memory that is fresh from the system a relu of 64 MiB takes twice as long, since each page is made when it is
first touched. Arguments are warm, too: what fits into the caches is read from there. This is so in a step if
the operator before made them, as when activations are made again one after the other; an operator of backward
that reads a small array which was kept from forward takes longer than measured here. With one thread its
processor time is taken, which leaves out what other programs do meanwhile; with several, time by the clock.

On CUDA some runs are timed together by events, so that an operator which is shorter than its launch counts
with what the host needs to launch it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from olla_fx import arena
from olla_fx.alignment import alignment_of, rounded
from olla_fx.arena import Arena, Buffer, PlannedRequest
from olla_fx.costs.kinds import Operands, can_be_measured, kind_of, operand_bytes, operator_name
from olla_fx.costs.measurements import Kind, Measurement, Measurements
from olla_fx.costs.seconds import operator_seconds
from olla_fx.costs.work import work_of
from olla_fx.dataflow import Dataflow
from olla_fx.torch_compat import real_tensors

logger = logging.getLogger(__name__)

REPETITIONS = 3
"""Runs of which the median counts."""

ENOUGH_SECONDS = 0.01
"""An operator that has run for so long, after the run that warms up, does not run again."""


Request: TypeAlias = tuple[int, int]
"""Of memory: its position among those of the operator, and its bytes."""


def measure_kinds(
    dataflow: Dataflow,
    known: Measurements,
    seconds: float,
    requests: Mapping[str, Sequence[Request]] | None = None,
    most_bytes: int | None = None,
) -> dict[Kind, Measurement]:
    """Measure what operators take, the dearest kinds first.

    Args:
        dataflow: the step.
        known: kinds that were measured before.
        seconds: for all of it; a run that has begun may take longer than was expected.
        requests: of operators, by name, that have run in this process: they are warm.
        most_bytes: kinds whose arguments and results are larger are left out; None measures all.

    Returns:
        The kinds that were measured now.
    """
    measured: dict[Kind, Measurement] = {}
    if arena.in_region():
        return measured
    device = dataflow.device
    stopwatch = _CudaStopwatch(device) if device.type == "cuda" else _Stopwatch(device)
    unknown = _unknown_kinds(dataflow, known)
    deadline = time.perf_counter() + seconds
    with _prepared(device):
        for kind, node, expected in unknown:
            is_too_large = most_bytes is not None and operand_bytes(node) > most_bytes
            # A run that warms up, half as long for the arguments, and those that are timed.
            if is_too_large or time.perf_counter() + (1.5 + stopwatch.runs) * expected > deadline:
                continue
            taken = _measured(node, stopwatch, deadline, (requests or {}).get(node.name))
            if taken is not None:
                work = work_of(node, device)
                measured[kind] = Measurement(operator_name(node), work, taken)
    return measured


def _unknown_kinds(dataflow: Dataflow, known: Measurements) -> list[tuple[Kind, fx.Node, float]]:
    """Return the kinds to measure, the dearest first: an operator of each, and its expected seconds."""
    expected: dict[Kind, float] = {}
    nodes: dict[Kind, fx.Node] = {}
    in_step: dict[Kind, float] = collections.defaultdict(float)
    costs = operator_seconds(dataflow, measurements=known)
    for node, seconds in zip(dataflow.operators, costs.seconds, strict=True):
        kind = kind_of(node)
        if kind not in known and can_be_measured(node, dataflow.device):
            expected[kind], nodes[kind] = seconds, nodes.get(kind, node)
            in_step[kind] += seconds
    dearest = sorted(in_step, key=lambda kind: -in_step[kind])
    return [(kind, nodes[kind], expected[kind]) for kind in dearest]


def _measured(
    node: fx.Node, stopwatch: _Stopwatch, deadline: float, requests: Sequence[Request] | None
) -> float | None:
    """Return the seconds of an operator; None if it refuses our numbers."""
    operator: Any = node.target
    try:
        arguments, keywords = stopwatch.operands.of(node)
        run = stopwatch.prepared(lambda: operator(*arguments, **keywords), requests)
        taken = [run()]
        while len(taken) < REPETITIONS and sum(taken) < ENOUGH_SECONDS and time.perf_counter() < deadline:
            taken.append(run())
        return statistics.median(taken)
    except (RuntimeError, MemoryError, IndexError) as error:
        logger.info("%s cannot be measured: %s", node.target, error)
        return None


@contextlib.contextmanager
def _prepared(device: torch.device) -> Iterator[None]:
    """Let operators compute on real tensors on a device; put the generators back if one draws unsaid."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(real_tensors())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield


class _Stopwatch:
    """Times calls on a CPU, with results and workspaces in a buffer of its own.

    Attributes:
        operands: makes the arguments of the calls.
        runs: of a call, between two readings of the clock.
    """

    runs = 1

    def __init__(self, device: torch.device) -> None:
        self.operands = Operands(device)
        self._device = device
        self._buffer: Buffer | None = None

    def prepared(self, call: Callable[[], object], requests: Sequence[Request] | None) -> Callable[[], float]:
        """Return what times a call; it runs once before if its requests are unknown."""
        if not arena.available(self._device):
            call()
            return lambda: _seconds(call)
        planned, end = [], 0
        for ordinal, size_bytes in self._recorded(call) if requests is None else requests:
            planned.append(PlannedRequest(0, ordinal, size_bytes, end))
            end = rounded(end + size_bytes, alignment_of(self._device))
        server = Arena(self._buffer_of(end), 1, planned)

        def run() -> float:
            with server.region():
                server.begin_operator(0)
                return _seconds(call)

        return run

    def _recorded(self, call: Callable[[], object]) -> list[Request]:
        recorder = Arena(Buffer(0, self._device), 1, ())
        with recorder.region(record=True):
            recorder.begin_operator(0)
            call()
        return [(request.ordinal, request.size_bytes) for request in recorder.recording()]

    def _buffer_of(self, size_bytes: int) -> Buffer:
        """Return a buffer of at least this size, every page of which was written."""
        if self._buffer is None or self._buffer.buffer_bytes < size_bytes:
            self._buffer = None
            self._buffer = Buffer(size_bytes, self._device)
            self._buffer.poison(0)
        return self._buffer


def usual_clock() -> Callable[[], float]:
    """Return what tells the seconds of kernels: see the module docstring."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds(call: Callable[[], object]) -> float:
    clock = usual_clock()
    started = clock()
    result = call()
    seconds = clock() - started
    del result
    return seconds


class _CudaStopwatch(_Stopwatch):
    """Times calls on a CUDA device, some of them together."""

    runs = 10

    def prepared(self, call: Callable[[], object], requests: Sequence[Request] | None) -> Callable[[], float]:
        """Return what times a call; it runs once before."""
        call()

        def run() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(self.runs):
                call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / self.runs

        return run
