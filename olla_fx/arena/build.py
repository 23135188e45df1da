"""Builds the native allocator when it is first needed.

The library lies in torch's cache of extensions, in a folder named after everything it depends on: the
sources, torch, Python. So a library that is there is right, and is imported without asking for a
compiler; and two versions of torch that share a cache never meet.

Two processes may want to build at once, and one may die while it builds. torch's own lock is a file, which a
killed process leaves behind for others to wait on forever; the operating system's lock around it goes away
with its holder, and whoever has it may clear the file away.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

DISABLING_VARIABLE = "OLLA_FX_DISABLE_ARENA"
_SOURCE_FOLDER = Path(__file__).parent
_SOURCES = ("cpu_arena.cpp",)
_HEADERS = ("buffer.h", "cursor.h", "recorder.h", "watchers.h")
_COMPILER_FLAGS = ("-O2",)


class NativeMemory(Protocol):
    """A buffer for one or more arenas."""

    is_busy: bool
    address: int
    outstanding: int

    def poison(self, byte: int) -> None:
        """Fill the buffer."""


class NativeArena(Protocol):
    """One program in a memory, as the native module knows it; rows are plain tuples."""

    def enter(self, record: bool, loose: bool) -> bool:
        """Start a run on this thread; False if that is impossible now."""

    def exit(self) -> bool:
        """End this thread's run; False if this thread runs no step in this arena."""

    def counters(self) -> tuple[int, int, int, int, int, int]:
        """The fields of ``Counters``."""

    def outside_log(self) -> list[tuple[int, int, int]]:
        """Operator, ordinal and bytes of requests that were not planned."""

    def recording(self) -> list[tuple[int, int, int, int, int, int | None, int | None, bool, bool]]:
        """The fields of ``RecordedRequest``."""


class NativeModule(Protocol):
    """What ``cpu_arena.cpp`` exports."""

    begin_operator: Callable[[int], None]

    def Memory(self, size_bytes: int) -> NativeMemory:
        """Allocate a buffer."""

    def Arena(
        self, memory: NativeMemory, operator_count: int, requests: Sequence[tuple[int, int, int, int]]
    ) -> NativeArena:
        """Put a program into a buffer."""

    def interrupt(self) -> None:
        """Leave this thread's requests to the stock allocator, uncounted, until ``resume``."""

    def resume(self) -> None:
        """Take back one ``interrupt``."""

    def in_region(self) -> bool:
        """Whether this thread is in a region."""

    def start_events(self) -> bool:
        """Record every thread's requests; False if somebody does already."""

    def stop_events(self) -> list[tuple[bool, int, int, bool]]:
        """End the recording: is it a free, block, bytes, on the planning thread."""


@dataclass(frozen=True, slots=True)
class _Build:
    module: NativeModule | None
    seconds: float | None


_lock = threading.Lock()
_build: _Build | None = None


def native_module() -> NativeModule | None:
    """The native module, built and installed on the first call; None where that is impossible.

    Warns once per process, with what to do about it, when the build fails.
    """
    if os.environ.get(DISABLING_VARIABLE, "") not in ("", "0"):
        return None
    return _built().module


def build_seconds() -> float | None:
    """Seconds that making the native module took in this process; None if it was not made (yet)."""
    return None if _build is None else _build.seconds


def _built() -> _Build:
    global _build
    with _lock:
        if _build is None:
            started = time.perf_counter()
            try:
                module = _load()
                _build = _Build(module, time.perf_counter() - started)
            except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                _build = _Build(None, None)
                warnings.warn(_advice(error), RuntimeWarning, stacklevel=4)
    return _build


def _advice(error: Exception) -> str:
    reason = str(error).strip().splitlines()
    return (
        "olla_fx cannot build its CPU allocator, so steps run in the planned order but with PyTorch's own "
        "allocator, not in one buffer. Install a C++ compiler (Debian, Ubuntu: apt-get install g++), the "
        "headers of this Python, and ninja (pip install ninja), or name the compiler in CXX; set "
        f"{DISABLING_VARIABLE}=1 to do without and without this warning. "
        f"Reason: {type(error).__name__}: {reason[0] if reason else 'unknown'}"
    )


def _load() -> NativeModule:
    name = f"olla_fx_cpu_arena_{_fingerprint()}"
    folder = _cache_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "olla_fx.lock"):
        library = folder / f"{name}.so"
        if library.exists():
            try:
                return _import(name, library)
            except ImportError:  # cut short by a crash, for instance: build it again
                library.unlink()
        (folder / "lock").unlink(missing_ok=True)
        return _compile(name, folder)


def _compile(name: str, folder: Path) -> NativeModule:
    # Costs a second to import, and is not needed when the library exists.
    from torch.utils import cpp_extension

    with _scripts_on_path(), warnings.catch_warnings():
        # torch warns of a missing compiler, too, before it fails; one warning is enough.
        warnings.simplefilter("ignore")
        module = cpp_extension.load(
            name,
            [str(_SOURCE_FOLDER / source) for source in _SOURCES],
            extra_cflags=list(_COMPILER_FLAGS),
            build_directory=str(folder),
            verbose=False,
        )
    return cast(NativeModule, module)


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Let torch find the ninja that pip put beside this Python, be the environment activated or not."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _import(name: str, library: Path) -> NativeModule:
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no library that Python can import")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(NativeModule, module)


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_SOURCE_FOLDER / name).read_bytes())
    environment = (torch.__version__, sys.implementation.cache_tag, platform.machine(), *_COMPILER_FLAGS)
    digest.update(repr(environment).encode())
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    from torch.utils import cpp_extension

    return Path(cpp_extension.get_default_build_root())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such lock on this system; torch's own still keeps builders apart
        yield
        return
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
