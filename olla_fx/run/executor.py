"""Keeps the plan of one step in force: a run is recorded, later ones are served from one buffer.

The first plan knows arrays only. Its run is a real step in planned order on the stock allocator, which needs
no more than its peak at any time, and records every request. The step is then planned again with the
operators' workspaces, and from the second run on the arena serves each request at its planned address
(profile-guided allocation §4, OLLA §3.5). A request that does not match falls through to the stock allocator
and is counted; a run that asks for more than was recorded is recorded again, in the buffer (§4.3).

On CUDA the recorded run is the second: in the first, libraries allocate what they keep for good (cuBLAS'
workspaces), and try out algorithms (cuDNN in benchmark mode), which no later run does.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from olla_fx import torch_compat
from olla_fx.arena import Arena, Binding, Buffer, PlannedRequest, RunCounts
from olla_fx.capture import Mode
from olla_fx.compile import plan_captured
from olla_fx.compiled import CompiledStep, CompileRequest
from olla_fx.dataflow import GradientsInBuffer, build_dataflow
from olla_fx.run.host_copies import HostCopies
from olla_fx.run.memory_errors import buffer_does_not_fit
from olla_fx.run.planned_run import PlannedRun
from olla_fx.run.pool import Lease, pool_of
from olla_fx.run.recording import StepRecord, planned_requests, problem_with_workspaces, read_recording
from olla_fx.run.timing import can_be_timed, extra_time_of, measure_operators
from olla_fx.run.waiting import gathered
from olla_fx.time_limit import TimeLimit
from olla_solvers.effort.freed_memory import return_freed_memory

MOST_RECORDINGS = 4
"""A step whose requests change from run to run is recorded so often, and then left as it is."""

RUNS_UNTIL_SETTLED = 2
"""Runs in the buffer after which a plan for a memory budget stays as it is; the first one makes its pages."""

_WARM_UPS = {"cuda": 1}
"""Runs of a plan before the one that is recorded, by the kind of device."""

CompileAgain = Callable[[StepRecord, GradientsInBuffer], CompiledStep]


class Executor:
    """Runs a step, and plans it again once a run was recorded.

    Attributes:
        step: the compiled step in force.
        leaves_stuck_gradients: True if gradients that a run had left in the buffer could not be moved.
        runs_alone: True if no other plan's run may have a part of the buffer meanwhile.
        tell_stuck: :meth:`note_stuck`, for the buffer to call.
        host_copies: copies what waits on the host.
    """

    def __init__(
        self,
        request: CompileRequest,
        step: CompiledStep,
        record: StepRecord | None = None,
        compile_again: CompileAgain | None = None,
    ) -> None:
        """Tell the device's pool of the plan; allocates nothing yet.

        Args:
            request: what was compiled.
            step: the result.
            record: of a run of the same operators, with whose workspaces the step was planned.
            compile_again: plans the step with a record and for gradients in the buffer; None for the usual
                way.
        """
        self._compile_again = compile_again
        self._request = request
        self._pool = pool_of(step.captured.device)
        self._requests: list[PlannedRequest] | None = None
        self._wants_recording = record is None
        self._recordings = 0
        self._warm_ups = 0 if record is not None else _WARM_UPS.get(step.captured.device.type, 0)
        self._record = record
        if record is not None:
            self._requests = planned_requests(step.plan.problem, step.plan.memory, record)
        self.step = step
        self._counts: list[RunCounts] = []
        self._outside_log: tuple[Sequence[tuple[int, int, int]], Sequence[str]] = (), ()
        self.leaves_stuck_gradients = self.runs_alone = False
        self.tell_stuck = weakref.WeakMethod(self.note_stuck)
        self._is_new = True
        self._is_gathered = False
        self._stalled_seconds = 0.0
        self.host_copies = HostCopies(request.step.options)
        self._until_settled = self._runs_until_settled()
        self._pool.want(self, step.plan.buffer_bytes)

    def _runs_until_settled(self) -> int:
        return 0 if self._record is None or self.step.plan.budget is None else RUNS_UNTIL_SETTLED

    def planned_for(self, gradients: GradientsInBuffer, limit: TimeLimit) -> Executor:
        """Return an executor of the same step with other gradients in the buffer.

        Args:
            gradients: that are made in the buffer.
            limit: of the call that plans.

        Raises:
            ValueError: before a run was recorded.
        """
        if self._record is None:
            raise ValueError("no run was recorded yet")
        record, step = self._compiled(self._record, gradients, limit)
        return Executor(self._request, step, record, self._compile_again)

    @property
    def counts(self) -> RunCounts:
        """The requests of the last complete run in the buffer."""
        return functools.reduce(RunCounts.and_those_of, self._counts, RunCounts())

    @property
    def outside_log(self) -> tuple[str, ...]:
        """The unexpected ones among them: operator, ordinal and bytes of each."""
        log, order = self._outside_log
        return tuple(
            f"{order[timestep]} request {ordinal}: {size_bytes} B" for timestep, ordinal, size_bytes in log
        )

    @property
    def stalled_seconds(self) -> float:
        """For which operators of the last complete run in the buffer waited for copies, on a CPU."""
        return self._stalled_seconds

    @property
    def record(self) -> StepRecord | None:
        """What its operators requested when it was recorded; None before."""
        return self._record

    def _compiled(
        self, record: StepRecord, gradients: GradientsInBuffer, limit: TimeLimit | None
    ) -> tuple[StepRecord | None, CompiledStep]:
        """Compile the step anew with what was recorded.

        Returns:
            The record, None if it is not the step's, and the step: a memory budget may take another graph.
        """
        if self._compile_again is not None:
            return record, self._compile_again(record, gradients)
        dataflow = self.step.dataflow
        if dataflow.gradients != gradients:
            dataflow = build_dataflow(dataflow.graph_module, dataflow.device, gradients)
        problem = problem_with_workspaces(dataflow.problem, record, dataflow.alignment_bytes)
        earlier = replace(self.step, dataflow=dataflow)
        request = replace(self._request, earlier=earlier, problem=problem, limit=limit)
        step = plan_captured(request, earlier.captured)
        is_same = step.dataflow.graph_module is dataflow.graph_module
        return record if is_same else None, step

    def note_stuck(self) -> None:
        """Note that gradients which a run had left in the buffer could not be moved."""
        self.leaves_stuck_gradients = True

    def start(self, lease: Lease | None, limit: TimeLimit | None = None) -> PlannedRun:
        """Begin a run.

        Args:
            lease: to run in the buffer; None runs with the stock allocator.
            limit: of the call in which the run will end, and the step be planned again if it was recorded;
                None if that call plans nothing else.

        Raises:
            BufferMemoryError: if the device has not enough memory for the buffer.
        """
        if self._is_new:
            # Only now is all that planning and the recorded run needed gone, and the buffer is not there yet.
            return_freed_memory()
            self._is_new = False
        # A graph that the caller captures would hold on to the buffer's addresses unknown to it.
        in_buffer = self.step.binding is Binding.BUFFER and not torch_compat.captures_current_stream()
        if lease is None or not in_buffer:
            return PlannedRun(self, self.step, None, lease)
        if not self._is_gathered and self._requests is not None and self._pool.is_host(self):
            self._gather()
        try:
            arena = self._arena(lease)
        except BaseException:
            lease.release()
            raise
        recorded = self._wants_recording and not self._warm_ups
        timed = self._until_settled == 1 and not self._wants_recording and can_be_timed(self.step)
        return PlannedRun(self, self.step, arena, lease, recorded=recorded, timed=timed, limit=limit)

    def _gather(self) -> None:
        """Place the arrays so that other plans can run in the rest of the buffer while a run waits."""
        self._is_gathered = True
        step = gathered(self.step)
        if step is not None and self._record is not None:
            self._use(step, self._record)

    def _use(self, step: CompiledStep, record: StepRecord | None) -> None:
        """Put a step in force that was planned with what was recorded; None if it is to be recorded."""
        self.step = step
        self._record = record
        self._wants_recording = record is None
        self._requests = (
            None if record is None else planned_requests(step.plan.problem, step.plan.memory, record)
        )
        self._until_settled = self._runs_until_settled()
        self._pool.want(self, step.plan.buffer_bytes)

    def _arena(self, lease: Lease) -> Arena:
        if self._requests is None:
            # What the operators request is not known yet: all of it is the stock allocator's to serve.
            lease.attend(self._pool, self)
            return Arena(Buffer(0, self.step.captured.device), len(self.step.plan.order), ())
        order, requests = self.step.plan.order, self._requests
        try:
            return lease.arena(
                self._pool,
                self,
                lambda buffer, base: Arena(buffer, len(order), requests, base),
                alone=self.runs_alone,
            )
        except MemoryError as error:
            raise buffer_does_not_fit(self.step) from error

    @property
    def is_settled(self) -> bool:
        """True if the next run will be served by a final plan, which knows the operators' workspaces."""
        return self.step.binding is Binding.BUFFER and not self._wants_recording

    def uses(self, arena: Arena, lease: Lease) -> bool:
        """Return True if a run with this lease is served by this arena, in its buffer.

        Raises:
            BufferMemoryError: if the device has not enough memory for the buffer.
        """
        return arena is self._arena(lease)

    def end(self, run: PlannedRun, *, again: bool) -> None:
        """Take over what a complete run in the buffer has shown.

        Args:
            run: its last phase has run.
            again: True if that phase will run again. What forward has left for it then stays where results of
                its operators have their places, so that requests which are not served say nothing.
        """
        if self._requests is not None:
            self._counts = run.counts
            self._outside_log = run.outside_log, run.step.plan.order
            self._stalled_seconds = run.stalled_seconds
        if run.is_repeated:
            return
        run.is_repeated = again
        if self._warm_ups and not run.recorded:
            self._warm_ups -= 1
        if run.recorded:
            run.recorded = False
            order = run.step.plan.order
            record = read_recording(run.step.dataflow, order, run.addresses, run.recording)
            self._measure(run, record)
            self._plan_again(record, run.gradients, run.limit)
        elif again or run.was_in_the_way or self._wants_recording:
            return
        elif any(counts.outside for counts in run.counts):
            self._wants_recording = self._recordings < MOST_RECORDINGS
        elif self._until_settled:
            self._until_settled -= 1
            if self._until_settled == 0:
                self._settle(run)

    def _settle(self, run: PlannedRun) -> None:
        """Tell what a plan's repetitions took, and drop what another choice for its budget would need."""
        if run.timed:
            plan = self.step.plan
            extra_time = extra_time_of(run.step.dataflow, plan.order, run.seconds)
            recomputed = replace(plan.recomputed, measured_extra_time=extra_time)
            self.step = replace(self.step, plan=replace(plan, recomputed=recomputed))
        if self.step.captured.mode is not Mode.AUTOGRAD:
            # In a loop of the caller's own a plan may be wanted for gradients that lie elsewhere.
            self.step = replace(self.step, budgeted=None)

    def _measure(self, run: PlannedRun, record: StepRecord) -> None:
        """Measure what operators take, if plans depend on it; a family's have no layouts of their own."""
        if self._request.step.options.asks_for_seconds and self._compile_again is None:
            plan = run.step.plan
            measure_operators(run.step.dataflow, record, run.recorded_seconds, plan.peak_bytes)

    def _plan_again(self, record: StepRecord, gradients: GradientsInBuffer, limit: TimeLimit | None) -> None:
        """Compile the step anew with what was recorded."""
        self._wants_recording = False
        self._record = record
        self._recordings += 1
        if record.unallocated:
            warnings.warn(
                f"the storage of {record.unallocated[0]} is not where its operator's fake tensors say; the "
                "step runs in planned order with the stock allocator. Please report the operator",
                RuntimeWarning,
                stacklevel=5,
            )
            request = replace(self._request, earlier=self.step, in_buffer=False, limit=limit)
            self.step = plan_captured(request, self.step.captured)
            return
        used, step = self._compiled(record, gradients, limit)
        self._use(step, used)
        self._is_gathered = False
        self._is_new = True
