"""Says of what the memory of a training process consists, after each stage of planning and each call.

    python examples/benchmarks/memory_account.py --case ResNet-18 --way "own loop"
    python examples/benchmarks/memory_account.py --case AdamW --way "whole step" --lines 30

One case of ``process_memory.py`` runs in one way, in memory ``returned``. The rows are MiB over the loaded
model:

* *resident*: the growth of the process, and *peak*, the most that it had so far.
* *library code*: pages of files, as those of PyTorch's libraries that code or its constants lie in. They are
  clean, processes share them, and the system takes them away when memory is short.
* *library data*: pages of these files that were written to, relocated addresses for the most part.
* *buffer*: pages of planned buffers that are resident.
* *Python*: arenas of Python's allocator for objects of up to 512 B; *objects*: what is in use of them.
* *other*: the rest: what C++ and larger Python objects allocate, and tensors outside of buffers.

Then come the modules that were imported on the way, and with ``--lines`` the lines of Python whose objects
are alive in the end, which a second process finds out, since tracing them takes memory itself.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_cases.cases import CASES, Run
from memory_cases.measure import SEED, WAYS, ProcessGauge, alive, ready
from process_memory import MIB, SETTINGS

from olla_fx.arena import Buffer

Account = dict[str, float]
COLUMNS = ("resident", "peak", "library code", "library data", "buffer", "Python", "objects", "other")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PRESENT = 1 << 63


def main() -> int:
    """Measure what the command line asks for, in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, metavar="CASE", required=True, help=f"of {', '.join(CASES)}")
    parser.add_argument("--way", choices=WAYS, default="own loop")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--lines", type=int, default=0, help="so many lines whose objects are alive")
    parser.add_argument("--inside", choices=("stages", "lines"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        (_print_lines if options.inside == "lines" else _print_stages)(options)
        return 0
    changes = {**SETTINGS["returned"], "OLLA_FX_CACHE_DIR": ""}
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    for inside in ("stages", "lines") if options.lines else ("stages",):
        command = [sys.executable, *sys.argv, "--inside", inside]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0


def account() -> Account:
    """Return of what this process's memory consists now, in MiB."""
    bytes_of: collections.Counter[str] = collections.Counter()
    is_file = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_file = len(words) > 5 and words[5].startswith("/")
        elif is_file and words[0] == "Rss:":
            bytes_of["library code"] += int(words[1]) << 10
        elif is_file and words[0] == "Private_Dirty:":
            bytes_of["library data"] += int(words[1]) << 10
            bytes_of["library code"] -= int(words[1]) << 10
    bytes_of["buffer"] = sum(
        _resident_bytes(buffer.address, buffer.buffer_bytes) for buffer in alive(Buffer) if buffer.address
    )
    bytes_of["Python"], bytes_of["objects"] = _python_bytes()
    bytes_of["resident"], bytes_of["peak"] = ProcessGauge.now(), ProcessGauge.peak()
    parts = ("library code", "library data", "buffer", "Python")
    bytes_of["other"] = bytes_of["resident"] - sum(bytes_of[part] for part in parts)
    return {column: bytes_of[column] / MIB for column in COLUMNS}


def _resident_bytes(address: int, size_bytes: int) -> int:
    """Return how many bytes of some memory are resident, in whole pages."""
    first, end = address // PAGE_BYTES, -(-(address + size_bytes) // PAGE_BYTES)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = struct.unpack(f"{end - first}Q", pagemap.read(8 * (end - first)))
    return PAGE_BYTES * sum(entry >= _PRESENT for entry in entries)


def _python_bytes() -> tuple[int, int]:
    """Return the bytes of Python's arenas, and those in use, which it writes to the error output alone."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        text = file.read().decode()
    arenas = re.search(r"arenas \* \d+ bytes/arena\s*=\s*([\d,]+)", text)
    used = re.search(r"# bytes in allocated blocks\s*=\s*([\d,]+)", text)
    if arenas is None or used is None:
        raise RuntimeError(f"this Python tells its memory in another form: {text[:200]!r}")
    return int(arenas[1].replace(",", "")), int(used[1].replace(",", ""))


def _print_stages(options: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    loop = CASES[options.case]()
    importlib.import_module("olla_fx.api")
    modules = set(sys.modules)
    account()
    gc.collect()
    loaded = account()
    ProcessGauge.reset()
    print(f"\n{options.case}, {options.way}: MiB over the loaded model\n")
    print(f"| after | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")

    def note(moment: str) -> None:
        now = account()
        print(f"| {moment} | {' | '.join(f'{now[column] - loaded[column]:.1f}' for column in COLUMNS)} |")

    with _stages_told(note):
        run = ready(loop, options.way)
        note("planned")
        gc.collect()
        note("planned, garbage collected")
        for call in range(options.calls):
            run()
            note(f"call {call + 1}")
        gc.collect()
        note("garbage collected")
    imported = sorted(set(sys.modules) - modules)
    print(f"\nimported meanwhile: {', '.join(imported) or 'nothing'}")


class _stages_told:
    """Tells of each stage of planning when the next one begins, while the context lasts."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        from olla_fx.progress import Progress

        self._begin = begin = Progress.begin
        note, last = self._note, ["imports"]

        def told(progress: Progress, stage: str, subject: str | None = None) -> None:
            note(last[0])
            last[0] = stage
            begin(progress, stage, subject)

        Progress.begin = told  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        from olla_fx.progress import Progress

        Progress.begin = self._begin  # type: ignore[method-assign]


def _print_lines(options: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    loop = CASES[options.case]()
    importlib.import_module("olla_fx.api")
    gc.collect()
    tracemalloc.start()
    run: Run = ready(loop, options.way)
    for _ in range(options.calls):
        run()
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    used, most = tracemalloc.get_traced_memory()
    print(
        f"\nPython's objects alive: {used / MIB:.1f} MiB, at most {most / MIB:.1f}. By file, then by line:\n"
    )
    for key in ("filename", "lineno"):
        for statistic in snapshot.statistics(key)[: options.lines]:
            frame = statistic.traceback[0]
            name = "/".join(Path(frame.filename).parts[-3:])
            line = f":{frame.lineno}" if key == "lineno" else ""
            print(f"{statistic.size / 1024:8.0f} KiB in {statistic.count:6d}  {name}{line}")
        print()


if __name__ == "__main__":
    sys.exit(main())
