"""Says what to do about a buffer that a device has no memory for."""

from __future__ import annotations

import torch

from olla_fx.compiled import CompiledStep
from olla_fx.errors import BufferMemoryError
from olla_fx.report import format_bytes


def buffer_does_not_fit(step: CompiledStep) -> BufferMemoryError:
    """Return the error for a step whose buffer cannot be allocated."""
    device, plan = step.captured.device, step.plan
    text = (
        f"the buffer of this step does not fit on {device}: planned are "
        f"{format_bytes(plan.buffer_bytes)}, beside {format_bytes(plan.static_bytes)} of parameters, "
        "state and inputs"
    )
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        text += (
            f"; free are {format_bytes(free_bytes)} of {format_bytes(total_bytes)}, and "
            f"{format_bytes(cached_bytes)} in torch's cache. A buffer of at most "
            f"{format_bytes(free_bytes + cached_bytes)} would fit"
        )
    return BufferMemoryError(f"{text}. Take a smaller batch, or accumulation_steps of a whole training step")
