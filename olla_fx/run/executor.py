"""Runs one planned graph: the first run is recorded, later ones are served from one buffer.

The first plan knows arrays only. Its run is a real step in planned order, served from a first buffer
as far as arrays go, that records every request. The plan is then made again with the operators'
workspaces, the graph is emitted anew, and from the second run on the arena serves each request at its
planned address (profile-guided allocation §4, OLLA §3.5). What does not match falls through to the
stock allocator and is counted; a run that asks for more than was recorded is recorded again (§4.3).

On CUDA the recorded run is the second: in the first, libraries allocate what they keep for good (cuBLAS'
workspaces), and try out algorithms (cuDNN in benchmark mode), which no later run does.
"""

from __future__ import annotations

import contextlib
import enum
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla_fx import arena, torch_compat
from olla_fx.capture import StepInput
from olla_fx.dataflow import Dataflow
from olla_fx.emit.codegen import prepared
from olla_fx.emit.emit import emit
from olla_fx.errors import BufferMemoryError
from olla_fx.report.table import format_bytes
from olla_fx.run.persistent import allocate_library_workspaces
from olla_fx.run.recording import (
    RecordingInterpreter,
    StepRecord,
    expected_requests,
    planned_requests,
    problem_with_workspaces,
    read_recording,
)
from olla_fx.run.shared_buffer import Lease, SharedBuffer
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem

MOST_RECORDINGS = 4
"""A step whose requests change from run to run is recorded so often, and then left as it is."""

_WARM_UPS = {"cuda": 1}
"""Runs of a plan before the one that is recorded, by the kind of device."""


class Binding(enum.StrEnum):
    """Where a step's arrays live: in the planned buffer, or wherever the stock allocator puts them."""

    BUFFER = "buffer"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Allocation requests of the last run.

    Attributes:
        served: served from the buffer.
        served_bytes: their bytes.
        outputs: served outside on purpose: what the caller gets, and persistent blocks.
        outside: of the planning thread, expected in the buffer but served outside.
        outside_bytes: their bytes.
        requests_on_worker_threads: made by other threads, which are never served.
    """

    served: int = 0
    served_bytes: int = 0
    outputs: int = 0
    outside: int = 0
    outside_bytes: int = 0
    requests_on_worker_threads: int = 0

    def __add__(self, other: RunCounts) -> RunCounts:
        """The counts of two phases together."""
        return RunCounts(
            self.served + other.served,
            self.served_bytes + other.served_bytes,
            self.outputs + other.outputs,
            self.outside + other.outside,
            self.outside_bytes + other.outside_bytes,
            self.requests_on_worker_threads + other.requests_on_worker_threads,
        )


class Executor:
    """One planned graph and, once recorded, its program.

    Attributes:
        plan: the plan in force.
        problem: what was planned.
        counts: of the last complete run in the buffer.
        outside_log: its unexpected requests: operator, ordinal and bytes of each.
        binding: where arrays live.
        emit_seconds: time spent on emitting.
        recordings: how many runs were recorded.
        phases: the emitted graphs, one for each phase.
        calls: what runs each of them.
        read: for each, the indices of the placeholders that it reads.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        plan: MemoryPlan,
        inputs: Sequence[StepInput],
        make_plan: Callable[[Problem], MemoryPlan],
        buffer: SharedBuffer,
    ) -> None:
        """Emit the first plan's graph.

        Args:
            dataflow: graph and problem.
            plan: a plan of ``dataflow.problem``.
            inputs: what the placeholders are.
            make_plan: plans a problem anew, with the options of the first plan.
            buffer: where to run.
        """
        self.dataflow = dataflow
        self._inputs = tuple(inputs)
        self._make_plan = make_plan
        self._buffer = buffer
        self._requests: list[arena.PlannedRequest] | None = None
        self._wants_recording = True
        self._warm_ups = _WARM_UPS.get(dataflow.device.type, 0)
        self.plan = plan
        self.problem = dataflow.problem
        self.counts = RunCounts()
        self.outside_log: tuple[str, ...] = ()
        self.binding = Binding.BUFFER if arena.available(dataflow.device) else Binding.STOCK
        self.emit_seconds = 0.0
        self.recordings = 0
        self.phases = self._emit()
        buffer.want(self, plan.buffer_bytes)

    def _emit(self) -> tuple[fx.GraphModule, ...]:
        started = time.perf_counter()
        in_buffer = self.binding is Binding.BUFFER
        marker = arena.begin_operator_function(self.dataflow.device) if in_buffer else None
        phases = emit(self.dataflow, self.problem, self.plan, self._inputs, marker)
        self.calls = tuple(prepared(phase) for phase in phases)
        self.read = tuple(_placeholders_read(phase) for phase in phases)
        self.emit_seconds += time.perf_counter() - started
        return phases

    def start(self, lease: Lease | None) -> Run:
        """Begin a run.

        Args:
            lease: of the buffer; None runs with the stock allocator.

        Raises:
            BufferMemoryError: when the device has not enough memory for the buffer.
        """
        # A graph that the caller captures would hold on to the buffer's addresses unknown to it.
        in_buffer = self.binding is Binding.BUFFER and not torch_compat.captures_current_stream()
        if lease is None or not in_buffer:
            return Run(self, self.phases, None, lease)
        try:
            program = self._program()
        except BaseException:
            lease.release()
            raise
        recorded = self._wants_recording and not self._warm_ups
        return Run(self, self.phases, program, lease, recorded=recorded, loose=self._wants_recording)

    def _program(self) -> arena.Arena:
        def make(buffer: arena.Buffer) -> arena.Arena:
            requests = self._requests
            if requests is None:
                requests = expected_requests(self.dataflow, self.plan)
            return arena.Arena(buffer, len(self.plan.order), requests)

        try:
            return self._buffer.program(self, self.dataflow.device, make)
        except MemoryError as error:
            raise self._too_large() from error

    @property
    def is_settled(self) -> bool:
        """Whether the next run will be served by a final plan, which knows the operators' workspaces."""
        return self.binding is Binding.BUFFER and not self._wants_recording

    def uses(self, program: arena.Arena) -> bool:
        """Whether a run would be served by this program, in its buffer; ask while holding a lease.

        Raises:
            BufferMemoryError: when the device has not enough memory for the buffer.
        """
        return program is self._program()

    def _too_large(self) -> BufferMemoryError:
        device, planned_bytes = self.dataflow.device, self.plan.buffer_bytes
        static_bytes = self.problem.static_bytes
        text = (
            f"the buffer of this step does not fit on {device}: planned are {format_bytes(planned_bytes)}, "
            f"beside {format_bytes(static_bytes)} of parameters, state and inputs"
        )
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            text += (
                f"; free are {format_bytes(free_bytes)} of {format_bytes(total_bytes)}, and "
                f"{format_bytes(cached_bytes)} in torch's cache. A budget of at most "
                f"{format_bytes(free_bytes + cached_bytes)} would fit"
            )
        return BufferMemoryError(f"{text}. Take a smaller batch, or micro_batches of a whole training step")

    def end(self, run: Run) -> None:
        """Take over what a complete run in the buffer has shown."""
        if self._warm_ups and not run.recorded:
            self._warm_ups -= 1
        self.counts = run.counts
        self.outside_log = tuple(
            f"{self.plan.order[timestep]} request {ordinal}: {size_bytes} B"
            for timestep, ordinal, size_bytes in run.outside_log
        )
        if run.recorded:
            order = self.plan.order
            self._adopt(read_recording(self.dataflow, order, run.addresses, run.recording))
        elif run.counts.outside and not self._wants_recording and self.recordings < MOST_RECORDINGS:
            self._wants_recording = True

    def _adopt(self, record: StepRecord) -> None:
        """Plan again with what was recorded."""
        self._wants_recording = False
        self.recordings += 1
        if record.unallocated:
            warnings.warn(
                f"the storage of {record.unallocated[0]} is not where its operator's fake tensors say; the "
                "step runs in planned order with the stock allocator. Please report the operator",
                RuntimeWarning,
                stacklevel=5,
            )
            self.binding = Binding.STOCK
            self.phases = self._emit()
            return
        alignment_bytes = self.dataflow.alignment_bytes
        self.problem = problem_with_workspaces(self.dataflow.problem, record, alignment_bytes)
        self.plan = self._make_plan(self.problem)
        self._requests = planned_requests(self.problem, self.plan, record)
        self._buffer.want(self, self.plan.buffer_bytes)
        self.phases = self._emit()


class Run:
    """One run of a step, phase by phase.

    Attributes:
        counts: of the phases so far.
        outside_log: operator, ordinal and bytes of unexpected requests so far.
        recorded: whether it is being recorded.
        addresses: for each timestep, where the operator's results are, if recorded.
        recording: the planning thread's requests, if recorded.
    """

    def __init__(
        self,
        executor: Executor,
        phases: Sequence[fx.GraphModule],
        program: arena.Arena | None,
        lease: Lease | None,
        *,
        recorded: bool = False,
        loose: bool = False,
    ) -> None:
        """Prepare a run; see :meth:`Executor.start`."""
        self._executor = executor
        self._phases = phases
        self._calls = executor.calls
        self._read = executor.read
        self._program = program
        self._lease = lease
        self._loose = loose
        self.recorded = recorded
        self.counts = RunCounts()
        self.outside_log: list[tuple[int, int, int]] = []
        self.addresses: dict[int, list[int | None]] = {}
        self.recording: list[arena.RecordedRequest] = []

    @property
    def program(self) -> arena.Arena | None:
        """What serves it; None if it does not run in the buffer."""
        return self._program

    def read_by(self, index: int) -> frozenset[int]:
        """The indices of the placeholders that a phase reads."""
        return self._read[index]

    def run_phase(self, index: int, arguments: Sequence[Any], *, last: bool = True) -> Any:
        """Run a phase.

        Args:
            index: which.
            arguments: of its graph.
            last: whether the run is over after it; otherwise the buffer stays claimed.
        """
        try:
            with torch.no_grad(), _without_autocast(self._executor.dataflow.device.type):
                results = self._run(index, arguments, last or index + 1 < len(self._phases))
            if last and self._program is not None:
                self._executor.end(self)
        except BaseException:
            self.release()
            raise
        if last:
            self.release()
        return results

    def _run(self, index: int, arguments: Sequence[Any], once: bool) -> Any:
        program = self._program
        if program is None:
            return self._calls[index](*arguments)
        phase = self._phases[index]
        allocate_library_workspaces(self._executor.dataflow.device)
        loose = self._loose
        if self.recorded and once:
            timesteps = {name: timestep for timestep, name in enumerate(self._executor.plan.order)}
            nodes = {
                node: timesteps[node.meta["operator"]]
                for node in phase.graph.nodes
                if "operator" in node.meta
            }
            interpreter = RecordingInterpreter(phase, nodes, self._executor.dataflow.device)
            with program.region(record=True, loose=loose):
                results = interpreter.run(*arguments)
            self.addresses.update(interpreter.addresses)
            self.recording.extend(program.recording())
        else:
            # A phase that will run again keeps what it was to free, so its requests are no pattern.
            self.recorded = False
            with program.region(loose=loose):
                results = self._calls[index](*arguments)
        self.counts += _counts(program)
        self.outside_log.extend(program.outside_log())
        return results

    def release(self) -> None:
        """Give the buffer back."""
        if self._lease is not None:
            self._lease.release()


def _placeholders_read(phase: fx.GraphModule) -> frozenset[int]:
    placeholders = phase.graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(placeholders) if node.users)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """What autocast casts is in the graph already; entering its context costs as much as some operators."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _counts(used: arena.Arena) -> RunCounts:
    counted = used.counters()
    return RunCounts(
        counted.served,
        counted.served_bytes,
        counted.outputs,
        counted.outside,
        counted.outside_bytes,
        counted.requests_on_worker_threads,
    )
