"""Runs one planned graph: the first call is recorded, later ones are served from one buffer.

The first plan knows arrays only. Its call is a real step in planned order, served from a first buffer
as far as arrays go, that records every request. The plan is then made again with the operators'
workspaces, the graph is emitted anew, and from the second call on the arena serves each request at its
planned address (profile-guided allocation §4, OLLA §3.5). What does not match falls through to the
stock allocator and is counted.
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla_fx import arena
from olla_fx.capture import StepInput
from olla_fx.dataflow import Dataflow
from olla_fx.emit import emit
from olla_fx.run.recording import (
    RecordingInterpreter,
    StepRecord,
    expected_requests,
    planned_requests,
    problem_with_workspaces,
    read_recording,
)
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem


class Binding(enum.StrEnum):
    """Where a step's arrays live: in the planned buffer, or wherever the stock allocator puts them."""

    BUFFER = "buffer"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Allocation requests of the last call.

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


class Executor:
    """One planned graph and, once recorded, its buffer."""

    def __init__(
        self,
        dataflow: Dataflow,
        plan: MemoryPlan,
        inputs: Sequence[StepInput],
        make_plan: Callable[[Problem], MemoryPlan],
    ) -> None:
        """Emit the first plan's graph.

        Args:
            dataflow: graph and problem.
            plan: a plan of ``dataflow.problem``.
            inputs: what the placeholders are.
            make_plan: plans a problem anew, with the options of the first plan.
        """
        self._dataflow = dataflow
        self._inputs = tuple(inputs)
        self._make_plan = make_plan
        self._arena: arena.CpuArena | None = None
        self.plan = plan
        self.problem = dataflow.problem
        self.counts = RunCounts()
        self.binding = Binding.BUFFER if arena.available() else Binding.STOCK
        self.emit_seconds = 0.0
        self.graph_module = self._emit()

    def _emit(self) -> fx.GraphModule:
        started = time.perf_counter()
        marker = arena.begin_operator_function() if self.binding is Binding.BUFFER else None
        graph_module = emit(self._dataflow, self.problem, self.plan, self._inputs, marker)
        self.emit_seconds += time.perf_counter() - started
        return graph_module

    def run(self, arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Run one step.

        Args:
            arguments: a value for each placeholder.

        Returns:
            The graph's results.
        """
        # What autocast casts is in the graph already.
        with torch.no_grad(), torch.autocast(self._dataflow.device.type, enabled=False):
            if self.binding is Binding.STOCK:
                results: Sequence[torch.Tensor] = self.graph_module(*arguments)
                return results
            if self._arena is None:
                return self._record(arguments)
            with self._arena.region():
                results = self.graph_module(*arguments)
            self.counts = _counts(self._arena)
            return results

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite the whole buffer, to show that no step depends on what an earlier one left."""
        if self._arena is not None:
            self._arena.poison(byte)

    @property
    def outside_log(self) -> tuple[str, ...]:
        """The last call's unexpected requests: operator, ordinal and bytes of each."""
        if self._arena is None:
            return ()
        return tuple(
            f"{self.plan.order[timestep]} request {ordinal}: {size_bytes} B"
            for timestep, ordinal, size_bytes in self._arena.outside_log()
        )

    def _record(self, arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        requests = expected_requests(self._dataflow, self.plan)
        recorder = arena.CpuArena(self.plan.buffer_bytes, len(self.plan.order), requests)
        timesteps = {name: timestep for timestep, name in enumerate(self.plan.order)}
        nodes = {
            node: timesteps[node.meta["operator"]]
            for node in self.graph_module.graph.nodes
            if "operator" in node.meta
        }
        interpreter = RecordingInterpreter(self.graph_module, nodes)
        with recorder.region(record=True, loose=True):
            results: Sequence[torch.Tensor] = interpreter.run(*arguments)
        self.counts = _counts(recorder)
        record = read_recording(self._dataflow, self.plan.order, interpreter.addresses, recorder.recording())
        self._adopt(record)
        return results

    def _adopt(self, record: StepRecord) -> None:
        """Plan again with what was recorded, and make the buffer."""
        if record.unallocated:
            warnings.warn(
                f"the storage of {record.unallocated[0]} is not where its operator's fake tensors say; the "
                "step runs in planned order with the stock allocator. Please report the operator",
                RuntimeWarning,
                stacklevel=5,
            )
            self.binding = Binding.STOCK
            self.graph_module = self._emit()
            return
        alignment_bytes = self._dataflow.alignment_bytes
        self.problem = problem_with_workspaces(self._dataflow.problem, record, alignment_bytes)
        self.plan = self._make_plan(self.problem)
        requests = planned_requests(self.problem, self.plan, record)
        self._arena = arena.CpuArena(self.plan.buffer_bytes, len(self.plan.order), requests)
        self.graph_module = self._emit()


def _counts(used: arena.CpuArena) -> RunCounts:
    counted = used.counters()
    return RunCounts(
        counted.served,
        counted.served_bytes,
        counted.outputs,
        counted.outside,
        counted.outside_bytes,
        counted.requests_on_worker_threads,
    )
