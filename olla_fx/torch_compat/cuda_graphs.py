"""Captures CUDA graphs such that a failed capture leaves the process as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what runs in the context.

    Other threads may run: one that pins batches calls what a capture of the whole process forbids.

    Args:
        graph: a new graph.
        stream: runs the context; afterwards the current stream is restored, also if the capture fails.

    Raises:
        RuntimeError: if the capture fails. What torch leaves behind is undone before: its allocator and its
            random generator would go on as if the graph were being captured, and refuse to work.
    """
    pool = torch.cuda.graph_pool_handle()
    # graph() does not leave its stream if it cannot end the capture.
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            if _end_allocations(stream.device.index, pool):
                _end_random_numbers(stream)
            raise


def captures_current_stream() -> bool:
    """Return True if the calling thread's current stream is being captured; False without CUDA."""
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_initialized and torch.cuda.is_current_stream_capturing())


def _end_allocations(device_index: int, pool: tuple[int, int]) -> bool:
    """End allocating to a memory pool; return True if it was in use, so that the capture did not end."""
    try:
        torch._C._cuda_endAllocateToPool(device_index, pool)
    except RuntimeError:  # it ended, and the graph gives its pool back; or it never began
        return False
    torch._C._cuda_releasePool(device_index, pool)
    return True


def _end_random_numbers(stream: torch.cuda.Stream) -> None:
    """Reset the generator by a capture that succeeds: nothing else tells it that the one before is over."""
    scratch = torch.zeros(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        scratch.zero_()
