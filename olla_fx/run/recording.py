"""Reads workspaces off a recorded run, and lists the requests that the arena is to serve.

A recorded request is one of four kinds. The block that a returned tensor lives in is that *array*'s,
decided by data pointers, never by sequence. A block freed inside its own operator is *workspace*. A block
that outlives its operator without being an array is *persistent* (a library's cache) and never placed. The
rest are the arrays that the caller gets.

Workspaces of one operator are placed among themselves first, on the finer timeline of its own requests
and frees, and enter the problem as one block of the height that this needs (profile-guided allocation
§4: record, then plan what was recorded).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla_fx.alignment import rounded
from olla_fx.arena import PlannedRequest, RecordedRequest
from olla_fx.costs import usual_clock
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import is_on
from olla_fx.torch_compat import pytree
from olla_solvers.place import place
from olla_solvers.plan import MemoryPlan, Span
from olla_solvers.problem import Array, ArrayKind, Operator, Problem

Address = int

WORKSPACE_SECONDS = 1.0
"""The time limit of placing one operator's scratch requests: there are hundreds of operators."""


@dataclass(frozen=True, slots=True)
class WorkspaceSlot:
    """One scratch request inside its operator's workspace: at ``offset`` from the workspace's start."""

    ordinal: int
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """One operator's requests of the allocator.

    Attributes:
        arrays: (ordinal, requested bytes, array index) for requests that became arrays.
        workspace: its scratch requests, placed.
        workspace_bytes: height of the workspace.
        persistent: (ordinal, requested bytes) of blocks that outlived it without being an array.
        storage_bytes: for each of ``arrays``, the bytes that its tensors have.
    """

    arrays: tuple[tuple[int, int, int], ...]
    workspace: tuple[WorkspaceSlot, ...]
    workspace_bytes: int
    persistent: tuple[tuple[int, int], ...]
    storage_bytes: tuple[int, ...] = ()

    @property
    def structure(self) -> tuple[tuple[int, ...], ...]:
        """What two recordings of an operator at different sizes have in common, if they can be compared."""
        return (
            tuple(ordinal for ordinal, _, _ in self.arrays),
            tuple(slot.ordinal for slot in self.workspace),
            tuple(ordinal for ordinal, _ in self.persistent),
        )

    @property
    def is_as_planned(self) -> bool:
        """True if the operator requested its arrays alone, each as large as its tensors."""
        sizes = tuple(size_bytes for _, size_bytes, _ in self.arrays)
        return not self.workspace and not self.persistent and sizes == self.storage_bytes


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded run.

    Attributes:
        operators: by operator name.
        unallocated: arrays for which the operator requested no memory: their storage is not the one that the
            fake tensors have, so no plan for them is valid.
        is_predicted: True if no such run was recorded: it follows from runs at other sizes.
    """

    operators: Mapping[str, OperatorRecord]
    unallocated: tuple[str, ...]
    is_predicted: bool = False


class NotingInterpreter(fx.Interpreter):
    """Runs an emitted graph and notes the addresses of each operator's results, and its seconds.

    Values are freed after their last use, as the generated code does.

    Attributes:
        addresses: for each timestep, where the operator's results are.
        seconds: for each timestep, what its call took: on CUDA its launch alone.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        operators: Mapping[fx.Node, int],
        device: torch.device,
        numbers: Mapping[str, Any],
    ) -> None:
        """Prepare a run.

        Args:
            graph_module: from :func:`olla_fx.emit.emit`.
            operators: timestep of each operator node.
            device: the device whose addresses are noted. Kernels return some numbers on the host that fake
                tensors have on the device, such as attention's random seed.
            numbers: attributes of the graph module that are others in this run.
        """
        super().__init__(graph_module, garbage_collect_values=True)
        # What a random operator draws for nobody is kept otherwise, as it has no last use.
        unread = (node for node in self.graph.nodes if not node.users and node.op != "output")
        self.user_to_last_uses.update(
            {node: [*self.user_to_last_uses.get(node, ()), node] for node in unread}
        )
        self.extra_traceback = False  # an error says what eager's says; a note names the operator
        self._operators = operators
        self._device = device
        self._numbers = numbers
        self._clock = usual_clock()
        self.addresses: dict[int, list[Address | None]] = {}
        self.seconds: dict[int, float] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a number, or a constant of the graph."""
        return self._numbers[target] if target in self._numbers else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; note an operator's seconds and where its results are, and its name if it raises."""
        started = self._clock()
        try:
            value = super().run_node(n)
        except Exception as error:
            error.add_note(f"raised by {n.name} in the planned step")
            raise
        timestep = self._operators.get(n)
        if timestep is not None:
            self.seconds[timestep] = self._clock() - started
            self.addresses[timestep] = [
                leaf.untyped_storage().data_ptr()
                if isinstance(leaf, torch.Tensor) and is_on(leaf, self._device)
                else None
                for leaf in pytree.tree_leaves(value)
            ]
        return value


def read_recording(
    dataflow: Dataflow,
    order: Sequence[str],
    addresses: Mapping[int, Sequence[Address | None]],
    recording: Sequence[RecordedRequest],
) -> StepRecord:
    """Tell arrays, workspaces and persistent blocks apart.

    Args:
        dataflow: the graph that ran.
        order: operator names, by timestep.
        addresses: for each timestep, of each flattened result.
        recording: the planning thread's requests, in order; their ``operator`` is the timestep.
    """
    by_operator: dict[int, list[RecordedRequest]] = collections.defaultdict(list)
    for request in recording:
        by_operator[request.operator].append(request)
    records: dict[str, OperatorRecord] = {}
    unallocated: list[str] = []
    for timestep, operator in enumerate(dataflow.problem.indices_of(order)):
        arrays = _arrays_by_address(dataflow, operator, addresses.get(timestep, ()))
        record, missing = _read_operator(timestep, by_operator[timestep], arrays, dataflow)
        records[order[timestep]] = record
        unallocated.extend(dataflow.problem.arrays[array].name for array in missing)
    return StepRecord(records, tuple(unallocated))


def _arrays_by_address(
    dataflow: Dataflow, operator: int, addresses: Sequence[Address | None]
) -> dict[Address, int]:
    produced = dataflow.produced[operator]
    return {
        address: array
        for array, address in zip(produced, addresses, strict=False)
        if array is not None and address
    }


def _read_operator(
    timestep: int, requests: Sequence[RecordedRequest], produced: Mapping[Address, int], dataflow: Dataflow
) -> tuple[OperatorRecord, list[int]]:
    arrays: dict[int, tuple[int, int, int]] = {}
    scratch: list[RecordedRequest] = []
    persistent: list[tuple[int, int]] = []
    # Backwards: if scratch was freed and the result took its address, the last request is the array's.
    for request in reversed(requests):
        array = produced.get(request.address)
        if array is not None and array not in arrays:
            arrays[array] = (request.ordinal, request.size_bytes, array)
        elif request.size_bytes == 0:
            continue
        elif request.freed_in_operator == timestep:
            scratch.append(request)
        else:
            persistent.append((request.ordinal, request.size_bytes))
    slots, height_bytes = _place_workspace(scratch[::-1], dataflow.alignment_bytes)
    missing = [array for array in produced.values() if array not in arrays]
    requested = tuple(sorted(arrays.values()))
    storage_bytes = tuple(dataflow.storage_bytes[array] for _, _, array in requested)
    record = OperatorRecord(requested, slots, height_bytes, tuple(sorted(persistent)), storage_bytes)
    return record, missing


def _place_workspace(
    requests: Sequence[RecordedRequest], alignment_bytes: int
) -> tuple[tuple[WorkspaceSlot, ...], int]:
    """Place an operator's scratch requests among themselves, by their own events."""
    if not requests:
        return (), 0
    end = max(request.freed_at or request.allocated_at for request in requests) + 1
    spans = [
        Span(
            str(request.ordinal),
            request.allocated_at,
            # A block freed by another thread may have been in use up to the end of the operator.
            end if request.freed_by_other_thread or request.freed_at is None else request.freed_at,
            rounded(request.size_bytes, alignment_bytes),
        )
        for request in requests
    ]
    placement = place(spans, solver="none", time_limit=WORKSPACE_SECONDS)
    slots = tuple(
        WorkspaceSlot(request.ordinal, request.size_bytes, offset)
        for request, offset in zip(requests, placement.offsets, strict=True)
    )
    return slots, placement.height_bytes


def problem_with_workspaces(problem: Problem, record: StepRecord, alignment_bytes: int) -> Problem:
    """Return the problem with what was recorded: workspaces, and arrays at least as large as requested."""
    requested: dict[int, int] = {}
    for operator_record in record.operators.values():
        for _, size_bytes, array in operator_record.arrays:
            requested[array] = rounded(size_bytes, alignment_bytes)
    operators = tuple(
        Operator(operator.name, record.operators[operator.name].workspace_bytes)
        for operator in problem.operators
    )
    arrays: list[Array] = []
    for index, planned in enumerate(problem.arrays):
        size_bytes = max(planned.size_bytes, requested.get(index, 0))
        arrays.append(dataclasses.replace(planned, size_bytes=size_bytes))
    return dataclasses.replace(problem, operators=operators, arrays=tuple(arrays))


def planned_requests(problem: Problem, plan: MemoryPlan, record: StepRecord) -> list[PlannedRequest]:
    """Return the requests to expect in a step, with the address that each gets.

    Args:
        problem: the one that was planned.
        plan: the order and offsets.
        record: each operator's requests.

    Returns:
        One entry for each recorded request, with timestep and ordinal. Output arrays and persistent blocks
        have no offset: they are served outside on purpose.
    """
    requests: list[PlannedRequest] = []
    for timestep, name in enumerate(plan.order):
        record_of_operator = record.operators[name]
        for ordinal, size_bytes, index in record_of_operator.arrays:
            array = problem.arrays[index]
            offset = plan.offsets[array.name] if array.kind is ArrayKind.PLANNED else None
            requests.append(PlannedRequest(timestep, ordinal, size_bytes, offset))
        base = plan.workspace_offsets.get(name, 0)
        for slot in record_of_operator.workspace:
            requests.append(PlannedRequest(timestep, slot.ordinal, slot.size_bytes, base + slot.offset))
        for ordinal, size_bytes in record_of_operator.persistent:
            requests.append(PlannedRequest(timestep, ordinal, size_bytes, None))
    return requests
