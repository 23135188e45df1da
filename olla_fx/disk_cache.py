"""Keeps plans on disk, so that a second start skips the solvers.

A plan is looked up by a digest of everything that it depends on: the problem (recorded workspaces
included), the planner's options, the version of torch, and the device. Files are JSON,
written under another name and then moved, so that no process reads half of one. A plan that is read is
validated against the problem like every plan; a file that is broken, or not a plan of this problem, is
ignored with a warning and written anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from olla_solvers.errors import OllaError, ProblemError
from olla_solvers.plan import MemoryPlan
from olla_solvers.plan_json import PLAN_FORMAT, plan_from_json, plan_to_json
from olla_solvers.problem import Problem
from olla_solvers.validate import validate

_Item = TypeVar("_Item")

FOLDER_VARIABLE = "OLLA_FX_CACHE_DIR"
"""Environment variable that names the folder of plans; if it is empty, none are kept."""

_RULES = 3
"""A version to raise whenever the planners' results change, so that older plans are not read."""


def cache_folder() -> Path | None:
    """Return the folder of plans; None if none are kept."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "olla_fx" / "plans"


def plan_path(problem: Problem, options: Mapping[str, object], device: torch.device) -> Path | None:
    """Return the file of a plan; None if none are kept.

    Args:
        problem: the operators and arrays to plan.
        options: all options of the planner.
        device: the device that the plan is for.
    """
    folder = cache_folder()
    if folder is None:
        return None
    key = {
        "rules": (_RULES, PLAN_FORMAT),
        "torch": torch.__version__,
        "device": device.type,
        "options": dict(options),
        "problem": problem.to_json(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest}.json"


def load_plan(path: Path | None, problem: Problem) -> MemoryPlan | None:
    """Read a plan and validate it; it has the provenance and timings of its first making.

    Args:
        path: from :func:`plan_path`; None if no plans are kept.
        problem: the operators and arrays of the plan.

    Returns:
        The plan; None if there is no such file, or, with a warning, if it cannot be used.
    """
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn_of(path, error)
        return None
    try:
        plan = plan_from_json(json.loads(text))
        validate(problem, plan)
        _check_size(problem, plan)
    except (OllaError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _warn_of(path, error)
        return None
    return plan


def remembered(device: torch.device, question: Mapping[str, object], answer: Callable[[], bool]) -> bool:
    """Return the answer to a question about a device's kernels, asked once for a machine and a torch.

    Args:
        device: the device.
        question: all that the answer depends on, as JSON can write it.
        answer: finds it out.
    """
    folder = cache_folder()
    if folder is None:
        return answer()
    key = {"torch": torch.__version__, "machine": machine_of(device), "question": dict(question)}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = folder / "kernels" / f"{digest}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = None
    except (OSError, ValueError) as error:
        _warn_of(path, error)
        known = None
    if not isinstance(known, bool):
        known = answer()
        _write(path, known)
    return known


def machine_of(device: torch.device) -> tuple[str, ...]:
    """Return what tells a device's kernels from those of other machines that share the folder of plans."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return name, platform.machine(), torch.backends.cpu.get_cpu_capability()


@functools.cache
def _processor() -> str:
    """Return the processor's name; on Linux, ``platform`` knows none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")


def read_lines(path: Path, read: Callable[[Any], _Item]) -> list[_Item]:
    """Read a file of :func:`add_lines`; leave out, with a warning, what cannot be read.

    Args:
        path: none, if nothing was written yet.
        read: makes an item of a line's document.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        _warn_of(path, error)
        return []
    items, broken = [], None
    for line in filter(None, text.splitlines()):
        try:
            items.append(read(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            broken = error
    if broken is not None:
        _warn_of(path, broken)
    return items


def add_lines(path: Path, documents: Iterable[object]) -> None:
    """Add a line for each document to a file, in one write; warn if that cannot be."""
    text = "\n".join(json.dumps(document) for document in documents)
    with _warned_of_folder(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as handle:
            # What a process that was killed left of a line does not spoil the next one.
            handle.write(f"\n{text}\n".encode())


def _check_size(problem: Problem, plan: MemoryPlan) -> None:
    """Refuse a buffer larger than its contents: valid, but no planner makes one."""
    sizes = {array.name: array.size_bytes for array in problem.planned}
    scratch = {operator.name: operator.workspace_bytes for operator in problem.operators}
    ends = [offset + sizes[name] for name, offset in plan.offsets.items()]
    ends += [offset + scratch[name] for name, offset in plan.workspace_offsets.items()]
    if plan.buffer_bytes != max(ends, default=0):
        raise ProblemError(f"a buffer of {plan.buffer_bytes} B for contents of {max(ends, default=0)} B")


def _warn_of(path: Path, error: Exception) -> None:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    warnings.warn(
        f"what is kept in {path} cannot be used and is made again: {reason}", RuntimeWarning, stacklevel=5
    )


def save_plan(path: Path | None, plan: MemoryPlan) -> None:
    """Write a plan for later starts; warn if it cannot be written; do nothing without a path."""
    if path is not None:
        _write(path, plan_to_json(plan))


def _write(path: Path, document: object) -> None:
    """Write a file, so that no process reads half of it; warn if it cannot be written."""
    with _warned_of_folder(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as handle:
            json.dump(document, handle)
        try:
            os.replace(handle.name, path)
        except OSError:
            os.unlink(handle.name)
            raise


@contextlib.contextmanager
def _warned_of_folder(path: Path) -> Iterator[None]:
    """Warn instead of raising an error of the file system: nothing of a step depends on what is kept."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"plans cannot be kept in {path.parent} ({error}); set {FOLDER_VARIABLE} to a folder, or to "
            "nothing to keep none",
            RuntimeWarning,
            stacklevel=5,
        )
