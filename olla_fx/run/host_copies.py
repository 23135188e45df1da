"""What the runs of a plan need whose arrays wait on the host: memory there, and what copies."""

from __future__ import annotations

from typing import cast

from olla_fx import torch_compat
from olla_fx.compiled import CompiledStep
from olla_fx.errors import StepModeError
from olla_fx.link import CopyEngines, HostMemory, Session, engines_for, link_for, offload
from olla_fx.options import Options


class HostCopies:
    """Makes a session for each run; copies end, and memory is freed, when this object is gone."""

    def __init__(self, options: Options) -> None:
        """Start without memory.

        Args:
            options: of the step; they have the link.
        """
        self._options = options
        self._engines: CopyEngines | None = None
        self._memory: HostMemory | None = None
        self._step: CompiledStep | None = None
        self._places: dict[int, tuple[int, int]] = {}

    def session(self, step: CompiledStep) -> Session | None:
        """Return a session for a run; None if nothing of the step waits on the host.

        Args:
            step: that is to run.

        Raises:
            HostMemoryError: if the host has not enough memory.
            StepModeError: within a CUDA graph.
        """
        if self._step is not step:
            self._step, self._places = step, _places(step)
        if not self._places:
            return None
        if torch_compat.captures_current_stream():
            raise StepModeError(
                "a step that swaps is captured in a CUDA graph, whose replays would use memory of the host "
                "that other runs have by then: plan it with swap=False there"
            )
        size_bytes, device = step.plan.memory.host_bytes, step.captured.device
        if self._memory is None or self._memory.size_bytes != size_bytes:
            self._memory = HostMemory(size_bytes, device)
        if self._engines is None:
            link = link_for(self._options, device)
            if link is None:
                raise ValueError("arrays wait on the host without a link")
            self._engines = engines_for(device, link)
        return Session(self._memory, self._engines, self._places)


def _places(step: CompiledStep) -> dict[int, tuple[int, int]]:
    """Return first byte and end on the host for each transfer's number."""
    places: dict[int, tuple[int, int]] = {}
    for node in step.dataflow.operators:
        if node.target is offload:
            first = step.plan.memory.host_offsets[node.name]
            places[cast(int, node.args[1])] = first, first + node.meta["val"].numel()
    return places
