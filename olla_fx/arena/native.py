"""Loads the native allocators of this process, one for each kind of device, when first needed."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from olla_fx.arena import build, cuda_headers

DISABLING_VARIABLE = "OLLA_FX_DISABLE_ARENA"

_CPU = build.Library("olla_fx_cpu_arena", "cpu_arena.cpp")
_CPU_NEEDS = (
    "Install a C++ compiler (Debian, Ubuntu: apt-get install g++), the headers of this Python, and ninja "
    "(pip install ninja), or name the compiler in CXX"
)
_CUDA_NEEDS = (
    f"{_CPU_NEEDS}; and give it CUDA's headers of the version that torch was built with: name the toolkit's "
    "folder in CUDA_HOME, or pip install nvidia-cuda-crt of that version beside torch's other CUDA packages"
)


class NativeMemory(Protocol):
    """A buffer for one or more arenas."""

    is_busy: bool
    address: int
    outstanding: int

    def poison(self, byte: int) -> None:
        """Fill the buffer."""


class NativeArena(Protocol):
    """One allocation table in a memory, as the native module has it; rows are plain tuples."""

    def enter(self, record: bool) -> bool:
        """Start a run on this thread; return False if that is impossible now."""

    def exit(self) -> bool:
        """End this thread's run; return False if this thread runs no step in this arena."""

    def counters(self) -> tuple[int, int, int, int, int, int]:
        """Return the fields of ``RunCounts``."""

    def outside_log(self) -> list[tuple[int, int, int]]:
        """Return operator, ordinal and bytes of requests that were not planned."""

    def recording(self) -> list[tuple[int, int, int, int, int, int | None, int | None, bool, bool]]:
        """Return the fields of ``RecordedRequest``."""


class NativeKept(Protocol):
    """What one phase of a step keeps for the next."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        """Keep some values."""

    def values(self) -> list[Any]:
        """Return it."""

    def pop(self) -> Any:
        """Return the last value, which is no longer kept."""


class NativeProgram(Protocol):
    """A phase of a step, instruction by instruction, over numbered slots; see ``program.h``.

    The methods add an instruction each; ``dead`` are the slots that nobody reads after it.
    """

    def begin(self, timestep: int) -> None:
        """Begin an operator."""

    def call_operator(
        self,
        name: str,
        dispatched_name: str,
        overload: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: int,
        dead: Sequence[int],
    ) -> bool:
        """Call an operator; return False if the dispatcher does not know it."""

    def call_function(
        self,
        name: str,
        function: Callable[..., Any],
        sources: Sequence[int],
        result: int,
        dead: Sequence[int],
    ) -> None:
        """Call Python."""

    def get_item(self, name: str, source: int, index: int, result: int, dead: Sequence[int]) -> None:
        """Take an item of a sequence."""

    def take_gradient(self, position: int, source: int, is_made_here: bool, dead: Sequence[int]) -> None:
        """Hand a gradient over."""

    def finish(self, results: Sequence[int], kept: Sequence[int], taken: Sequence[int]) -> None:
        """End the program.

        Args:
            results: slots that are returned.
            kept: slots that the next phase takes over.
            taken: slots for what the phase before has kept.
        """

    def run(
        self, inputs: Iterable[Any], kept: NativeKept | None, gradients: TakenGradients | None
    ) -> list[Any]:
        """Run with the values of the first slots; a failing operator is named in a note of its exception."""


class LeftGradients(Protocol):
    """Gradients that became ``.grad`` in a buffer; a run adds to them as it makes them."""

    def any_alive(self) -> bool:
        """Return True if one of them is alive."""

    def alive(self) -> list[torch.Tensor]:
        """Return those that are alive."""

    def take(self) -> list[torch.Tensor]:
        """Return those that are alive, and forget all."""

    def put_back(self, gradient: torch.Tensor) -> None:
        """Remember one again."""


class TakenGradients(Protocol):
    """The gradients of one backward, by their position among those of the step."""

    @property
    def left(self) -> LeftGradients | None:
        """Those that became ``.grad`` in the buffer; None if there cannot be any."""

    def leave_out(self, positions: Iterable[int]) -> None:
        """Do not take gradients that eager would not make."""

    def accumulate_directly(self, edges: Sequence[int]) -> None:
        """Add to ``.grad`` at once if autograd would add this gradient alone, with no hook that sees it.

        Args:
            edges: how many lead to each leaf as far as is known; empty for one each.
        """

    def cut_edges(self) -> bool:
        """Cut the edges from the node whose backward is under way if nothing will come over any of them.

        The engine would visit each leaf with nothing. To be called at the end of the node's last backward.

        Returns:
            False if they stay.
        """

    def suited(self) -> tuple[list[int], list[int]] | None:
        """Return what a plan for such a backward keeps and adds in the buffer; None if that is this plan.

        To be asked before the backward runs.
        """

    def take(self, position: int, gradient: torch.Tensor, is_made_here: bool) -> None:
        """Take a gradient; emitted code calls this right after the operator that makes it.

        Args:
            position: among the gradients of the step.
            gradient: may share its storage with another gradient.
            is_made_here: False if it is a tangent, a tensor of the caller's, or what forward has saved.
        """

    def for_autograd(self) -> list[torch.Tensor | None]:
        """Return for each position what autograd is to be given, no two in one storage."""


class NativeModule(Protocol):
    """The exports of ``module.h``."""

    begin_operator: Callable[[int], None]
    Kept: type[NativeKept]

    def Program(self, slot_count: int) -> NativeProgram:
        """Begin a program of so many values."""

    def Slot(self, index: int) -> object:
        """Return what stands for a value among the arguments of an operator."""

    def Gradients(
        self, leaves: Sequence[torch.Tensor], kept: Iterable[int], added: Iterable[int]
    ) -> TakenGradients:
        """Take the gradients of leaves, some of which a plan keeps in the buffer or adds from there."""

    def Memory(self, size_bytes: int, device_index: int) -> NativeMemory:
        """Allocate a buffer; on the present device if the index is negative."""

    def Arena(
        self, memory: NativeMemory, operator_count: int, requests: Sequence[tuple[int, int, int, int]]
    ) -> NativeArena:
        """Put an allocation table into a buffer."""

    def interrupt(self) -> None:
        """Leave this thread's requests to the stock allocator, uncounted, until ``resume``."""

    def resume(self) -> None:
        """Take back one ``interrupt``."""

    def in_region(self) -> bool:
        """Return True if this thread is in a region."""

    def shares_storage(self, tensor: torch.Tensor) -> bool:
        """Return True if other tensors look into a tensor's memory."""

    def start_events(self) -> bool:
        """Record every thread's requests; return False if they are being recorded already."""

    def stop_events(self) -> list[tuple[bool, int, int, bool, bool]]:
        """End the recording; return for each event: is it a free, block, bytes, on the planning thread."""


@dataclass(frozen=True, slots=True)
class _Build:
    module: NativeModule | None
    seconds: float | None


_lock = threading.Lock()
_builds: dict[str, _Build] = {}


def native_module(device_type: str = "cpu") -> NativeModule | None:
    """Return a device's native module, built and installed on the first call; None if that is impossible.

    Warns once per process and device, with what to do about it, if the build fails.

    Args:
        device_type: ``cpu`` or ``cuda``; other devices have none.
    """
    if os.environ.get(DISABLING_VARIABLE, "") not in ("", "0") or device_type not in ("cpu", "cuda"):
        return None
    with _lock:
        if device_type not in _builds:
            _builds[device_type] = _build(device_type)
        return _builds[device_type].module


def loaded_modules() -> list[NativeModule]:
    """Return the native modules that were loaded in this process."""
    return [loaded.module for loaded in list(_builds.values()) if loaded.module is not None]


def build_seconds() -> float | None:
    """Return the seconds spent on loading native modules in this process; None if none was loaded."""
    seconds = [loaded.seconds for loaded in list(_builds.values()) if loaded.seconds is not None]
    return sum(seconds) if seconds else None


def _build(device_type: str) -> _Build:
    started = time.perf_counter()
    try:
        if device_type == "cuda":
            # The current allocator's state is made with the driver's context. A torch without CUDA refuses
            # by an AssertionError.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        library = cuda_headers.library() if device_type == "cuda" else _CPU
        module = cast(NativeModule, build.load(library))
        return _Build(module, time.perf_counter() - started)
    except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(_advice(device_type, error), RuntimeWarning, stacklevel=5)
        return _Build(None, None)


def _advice(device_type: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()
    needs = _CUDA_NEEDS if device_type == "cuda" else _CPU_NEEDS
    return (
        f"olla_fx cannot build its {device_type.upper()} allocator, so steps run in the planned order but "
        f"with PyTorch's own allocator, not in one buffer. {needs}; set {DISABLING_VARIABLE}=1 to do without "
        f"and without this warning. Reason: {type(error).__name__}: {reason[0] if reason else 'unknown'}"
    )
