"""Runs one compiled step once, phase by phase: in the buffer, or with the stock allocator.

Between its phases, the forward and the backward of the caller's own loop, a run holds no more of the buffer
than what is alive then; other runs may have the rest. A run that is recorded or timed interprets the graph
operator by operator; all others call the generated code.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from olla_fx.arena import Arena, LeftGradients, RecordedRequest, RunCounts
from olla_fx.compiled import CompiledStep
from olla_fx.link import Session
from olla_fx.run.host_copies import HostCopies
from olla_fx.run.persistent import allocate_library_workspaces
from olla_fx.run.pool import Lease, Way
from olla_fx.run.recording import NotingInterpreter
from olla_fx.time_limit import TimeLimit
from olla_solvers.effort.freed_memory import garbage_collected


class RunOwner(Protocol):
    """What starts runs and learns from them.

    Attributes:
        host_copies: copies what waits on the host.
        tell_stuck: for the buffer to call if gradients that a run left there could not be moved.
    """

    host_copies: HostCopies
    tell_stuck: weakref.WeakMethod[Callable[[], None]]

    def end(self, run: PlannedRun, *, again: bool) -> None:
        """Take over what a complete run in the buffer has shown.

        Args:
            run: its last phase has run.
            again: True if that phase will run again.
        """


class PlannedRun:
    """One run of a step, phase by phase.

    Attributes:
        step: what runs.
        arena: serves or records it; None if it runs with the stock allocator, or is over.
        counts: of each phase so far.
        outside_log: operator, ordinal and bytes of unexpected requests so far.
        recorded: True if it is being recorded.
        recorded_seconds: of its phases so far, if recorded.
        timed: True if its operators are timed.
        seconds: of each operator by timestep, if timed.
        is_repeated: True if its last phase runs several times.
        addresses: for each timestep, where the operator's results are, if recorded.
        recording: the planning thread's requests, if recorded.
        gradients: those that a plan for such a run should have in the buffer.
        was_in_the_way: True if other runs held something where its arrays belong.
        limit: for planning again after it.
    """

    def __init__(
        self,
        owner: RunOwner,
        step: CompiledStep,
        arena: Arena | None,
        lease: Lease | None,
        *,
        recorded: bool = False,
        timed: bool = False,
        limit: TimeLimit | None = None,
    ) -> None:
        """Prepare a run; gives the lease back if that fails.

        Args:
            owner: learns what the run has shown.
            step: what runs.
            arena: to serve or record it; None to run with the stock allocator.
            lease: of the buffer; None without one.
            recorded: True to record it.
            timed: True to time its operators.
            limit: for planning again after it.
        """
        self._owner = owner
        self._lease = lease
        self.step = step
        self.arena = arena
        self.recorded = recorded
        self.recorded_seconds = 0.0
        self.timed = timed
        self.seconds: dict[int, float] = {}
        self.limit = limit
        self.is_repeated = False
        self.counts: list[RunCounts] = []
        self.outside_log: list[tuple[int, int, int]] = []
        self.addresses: dict[int, list[int | None]] = {}
        self.recording: list[RecordedRequest] = []
        self.gradients = self.step.dataflow.gradients
        self.was_in_the_way = False
        self._session: Session | None = None
        try:
            self._session = owner.host_copies.session(step)
        except BaseException:
            self.release()
            raise

    @property
    def stalled_seconds(self) -> float:
        """For which its operators have waited for copies."""
        return 0.0 if self._session is None else self._session.stalled_seconds

    def run_phase(self, index: int, arguments: Sequence[Any], *, last: bool = True) -> Any:
        """Run a phase.

        Args:
            index: which.
            arguments: of its graph.
            last: True if the run is over after it; otherwise the buffer stays claimed, for the next phase or
                for this one again.
        """
        if index and self._lease is not None:
            way = self._lease.resume()
            self.was_in_the_way |= way is not Way.FREE
            if way is Way.BUSY:
                self.arena = None
        try:
            device_type = self.step.captured.device.type
            if torch.is_autocast_enabled(device_type):  # what it casts is in the graph already
                with torch.autocast(device_type, enabled=False):
                    results = self._run_with_copies(index, arguments)
            else:
                results = self._run_with_copies(index, arguments)
            if self.arena is not None and index + 1 == len(self.step.emitted.functions):
                self._owner.end(self, again=not last)
        except BaseException:
            self.release()
            raise
        if last:
            self.release()
        elif self._lease is not None:
            # The pool must not hold on to the run, which ends when its caller drops it.
            self._lease.wait(functools.partial(_held_range, None if self.arena is None else self.step))
        return results

    def _run_with_copies(self, index: int, arguments: Sequence[Any]) -> Any:
        if self._session is None:
            return self._run(index, arguments)
        with self._session.entered():
            return self._run(index, arguments)

    def _run(self, index: int, arguments: Sequence[Any]) -> Any:
        function = self.step.emitted.functions[index]
        if self.arena is None:
            return function(*arguments)
        allocate_library_workspaces(self.step.captured.device)
        if self.recorded or self.timed:
            with garbage_collected():  # the graph that was written for it
                results = self._run_one_by_one(self.arena, index, arguments)
        else:
            results = self.arena.run(function, arguments)
        counts = self.arena.counts()
        self.counts.append(counts)
        if counts.outside:
            self.outside_log.extend(self.arena.outside_log())
        return results

    def _run_one_by_one(self, arena: Arena, index: int, arguments: Sequence[Any]) -> Any:
        """Run a phase operator by operator; note every request, where each result is, and the time."""
        # Written for this run alone: later ones have no use for it.
        phase = self.step.emitted.write()[index]
        timesteps = {name: timestep for timestep, name in enumerate(self.step.plan.order)}
        operators = {
            node: timesteps[node.meta["operator"]] for node in phase.graph.nodes if "operator" in node.meta
        }
        interpreter = NotingInterpreter(
            phase, operators, self.step.captured.device, self.step.emitted.numbers
        )
        started = time.perf_counter()
        with torch.no_grad(), arena.region(record=self.recorded):
            results = interpreter.run(*arguments)
        if index + 1 < len(self.step.emitted.functions):
            answer, kept = results
            results = answer, list(kept)  # a list of the graph's cannot be emptied
        self.seconds.update(interpreter.seconds)
        if self.recorded:
            self.recorded_seconds += time.perf_counter() - started
            self.addresses.update(interpreter.addresses)
            self.recording.extend(arena.recording())
        return results

    def leave_gradients(self, gradients: LeftGradients | None) -> None:
        """Say what will lie in the buffer when it is given back."""
        if self._lease is not None and gradients is not None:
            self._lease.leave_gradients(gradients, self._owner.tell_stuck)

    def release(self) -> None:
        """Give the buffer back, and the host's."""
        self.arena = None  # which would keep its memory
        try:
            if self._session is not None:
                self._session.close()
        finally:
            # Closing waits, and may be interrupted.
            if self._lease is not None:
                self._lease.release()


def _held_range(step: CompiledStep | None) -> tuple[int, int]:
    """Return what a run holds while it waits for its next phase; None for one on the stock allocator."""
    return (0, 0) if step is None else step.held_while_waiting
