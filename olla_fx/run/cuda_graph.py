"""Runs a planned step as one CUDA graph.

In its buffer a step works on the same addresses every time, so that its kernels can be captured once and
launched together. What is not in the buffer must keep its address, too: inputs are copied into slots of the
graph's own, results out of them; parameters, buffers and optimizer state are used at their addresses, and a
graph is captured anew if one of them has moved. Numbers are baked into a graph: it is captured anew if a
learning rate has changed, a few times, after which the step runs without a graph and warns why.

The first settled step runs on the stream that is to be captured, because libraries allocate when they first
work on a stream.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.arena import Arena
from olla_fx.capture import CapturedStep, Mode, Role, StepRequest
from olla_fx.errors import CaptureError, UnsupportedOptimizerError
from olla_fx.run.copies import copies_of
from olla_fx.run.executor import Executor
from olla_fx.run.persistent import allocate_library_workspaces
from olla_fx.run.pool import Lease
from olla_fx.time_limit import TimeLimit

MOST_CAPTURES = 8
"""The number of captures after which a step with other numbers or addresses runs without a graph."""


def check_graph_request(request: StepRequest, device: torch.device) -> None:
    """Refuse what no CUDA graph can hold.

    Args:
        request: the step to plan.
        device: of model and inputs.

    Raises:
        CaptureError: if the device is not CUDA, or the caller runs the loop.
        UnsupportedOptimizerError: if the optimizer counts its steps on the host.
    """
    if device.type != "cuda":
        raise CaptureError(f"cuda_graph=True needs model and inputs on a CUDA device; they are on {device}")
    if request.mode is Mode.AUTOGRAD:
        raise CaptureError(
            "cuda_graph=True holds a whole training step or an inference: give loss_fn and optimizer, too, "
            "or call model.eval()"
        )
    optimizer = request.optimizer
    if optimizer is None or isinstance(optimizer, torch.optim.SGD):
        return
    name = type(optimizer).__name__
    if "capturable" not in optimizer.defaults:
        raise UnsupportedOptimizerError(
            f"{name} counts its steps in numbers on the host, which a CUDA graph would hold on to: use "
            "SGD, or an optimizer that has capturable=True"
        )
    for group in optimizer.param_groups:
        if not group["capturable"] or not (
            isinstance(group["lr"], torch.Tensor) or isinstance(optimizer, torch.optim.Rprop)
        ):
            raise UnsupportedOptimizerError(
                "a CUDA graph bakes Python's numbers, so cuda_graph=True needs capturable=True and a tensor "
                f"as learning rate: {name}(model.parameters(), lr=torch.tensor(1e-3, device=...), "
                "capturable=True)"
            )


@dataclass(frozen=True)
class _Captured:
    """A graph, and the inputs that it is valid for.

    Attributes:
        graph: launches all kernels of a step.
        arena: served the captured step; without it the buffer may be gone.
        slots: for each placeholder that is an example, the graph's own tensor.
        addresses: of all other tensors.
        numbers: baked into the graph.
        results: the graph's own.
    """

    graph: torch.cuda.CUDAGraph
    arena: weakref.ref[Arena]
    slots: dict[int, torch.Tensor]
    addresses: tuple[int, ...]
    numbers: tuple[float, ...]
    results: list[Any]


class GraphedStep:
    """Runs one planned step, by a graph if possible.

    Attributes:
        fallback: the reason why steps run without a graph; None if there is none.
        captures: the number of captured graphs.
        replays: the number of replayed steps.
        gradients: of a step in micro-batches, what these add to: a graph holds on to their addresses.
    """

    def __init__(self, captured: CapturedStep, executor: Executor) -> None:
        """Start without a graph.

        Args:
            captured: the step.
            executor: runs it without a graph.
        """
        self._executor = executor
        # A replay writes to the addresses that were captured, whatever is there.
        executor.runs_alone = True
        self._device = captured.device
        inputs = list(enumerate(captured.inputs))
        self._numbers = [index for index, value in inputs if value.spec is None]
        self._examples = [index for index, value in inputs if value.role is Role.EXAMPLE]
        self._tensors = [
            index for index, value in inputs if value.spec is not None and value.role is not Role.EXAMPLE
        ]
        self._stream: torch.cuda.Stream | None = None
        self._captured: _Captured | None = None
        self.fallback = _fallback_reason(captured)
        self.captures = 0
        self.replays = 0
        self.gradients: list[torch.Tensor] = []

    def run(self, lease: Lease | None, values: Sequence[Any], limit: TimeLimit) -> Any:
        """Run a step.

        Args:
            lease: to run in the buffer.
            values: of the graph's placeholders.
            limit: of the call, for planning again after a recorded run.

        Returns:
            The results; of a replayed step copies, which the next one leaves alone.
        """
        may_use_graph = self.fallback is None and self._executor.is_settled
        if not may_use_graph or lease is None or torch_compat.captures_current_stream():
            return self._executor.start(lease, limit).run_phase(0, values)
        if self._stream is None:
            return self._run_on_stream(lease, values)
        try:
            ready = (
                self._captured if self._fits(lease, values) else self._capture(lease, self._stream, values)
            )
            if ready is None:
                return self._executor.start(lease).run_phase(0, values)
            return self._replay(ready, values)
        finally:
            lease.release()

    def _run_on_stream(self, lease: Lease, values: Sequence[Any]) -> Any:
        """Run a step without a graph, on the stream that the graph will be captured from."""
        stream = _capture_stream(self._device)
        outer = torch.cuda.current_stream(self._device)
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            results = self._executor.start(lease).run_phase(0, values)
        outer.wait_stream(stream)
        self._stream = stream
        for result in results:
            if isinstance(result, torch.Tensor) and result.is_cuda:
                result.record_stream(outer)
        return results

    def _fits(self, lease: Lease, values: Sequence[Any]) -> bool:
        """Return True if the captured graph does what a step with these values would do."""
        captured = self._captured
        arena = None if captured is None else captured.arena()
        return (
            captured is not None
            and arena is not None
            and self._executor.uses(arena, lease)
            and captured.numbers == self._numbers_of(values)
            and captured.addresses == self._addresses_of(values)
        )

    def _numbers_of(self, values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(values[index] for index in self._numbers)

    def _addresses_of(self, values: Sequence[Any]) -> tuple[int, ...]:
        return tuple(values[index].data_ptr() for index in self._tensors)

    def _capture(self, lease: Lease, stream: torch.cuda.Stream, values: Sequence[Any]) -> _Captured | None:
        """Capture a graph; return None, with the reason in ``fallback``, if that fails."""
        self._captured = None
        if self.captures >= MOST_CAPTURES:
            self._fall_back(
                f"{MOST_CAPTURES} graphs were captured, and numbers or addresses changed again; a learning "
                "rate that a scheduler changes belongs into a tensor, with capturable=True"
            )
            return None
        # Slots are written in later calls, whatever modes are on then.
        with torch.inference_mode(False):
            slots = {index: torch.empty_like(values[index]) for index in self._examples}
        graph_inputs = [slots.get(index, value) for index, value in enumerate(values)]
        with torch.cuda.stream(stream):
            # Another thread's step may have run on the stream.
            allocate_library_workspaces(self._device)
        graph = torch.cuda.CUDAGraph()
        # A run that raises gives its lease back; the caller's must last.
        run = self._executor.start(lease.lend())
        try:
            with torch_compat.capturing(graph, stream):
                results = run.run_phase(0, graph_inputs, last=False)
        except RuntimeError as error:
            self._fall_back(f"capturing failed: {_cause_of(error)}")
            return None
        arena = run.arena
        if arena is None:
            self._fall_back("the step does not run in the buffer")
            return None
        self.captures += 1
        numbers, addresses = self._numbers_of(values), self._addresses_of(values)
        self._captured = _Captured(graph, weakref.ref(arena), slots, addresses, numbers, list(results))
        return self._captured

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        warnings.warn(f"steps run without a CUDA graph: {reason}", RuntimeWarning, stacklevel=6)

    def _replay(self, captured: _Captured, values: Sequence[Any]) -> list[Any]:
        # Entering the region makes this stream wait for the one that used buffer and slots before.
        arena = captured.arena()
        with torch.no_grad(), contextlib.nullcontext() if arena is None else arena.region():
            for index, slot in captured.slots.items():
                slot.copy_(values[index], non_blocking=True)
            captured.graph.replay()
        self.replays += 1
        return copies_of(captured.results, range(len(captured.results)))


def _fallback_reason(captured: CapturedStep) -> str | None:
    """Return why no graph can hold a step; None if one can."""
    for index in captured.written:
        if captured.inputs[index].role is Role.EXAMPLE:
            return f"the step writes to its input {captured.inputs[index].name}"
    for step_input in captured.inputs:
        name, spec = step_input.name, step_input.spec
        if spec is not None and spec.device.type != "cuda":
            return f"{step_input.role} {name} is on the {spec.device}, and a graph would hold on to its value"
    return None


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all graphs of a device: libraries keep a workspace for each stream they used."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cause_of(error: RuntimeError) -> str:
    """Return the error that made a capture fail; the capture's end says only that something did.

    Not in the frame that the error was raised in: that would keep alive what was in the buffer.
    """
    cause = error.__context__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]
