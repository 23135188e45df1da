"""Keeps the seconds that kinds of operators were measured to take, on disk, beside the plans.

There is one file for a machine, a version of torch and the settings that choose kernels, the number of
threads among them. Each line is a kind. Lines are added at the end of the file by one write each time, so
that processes which measure at once do not harm each other; of two lines of one kind the later one holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from olla_fx import disk_cache
from olla_fx.costs.work import Work
from olla_fx.torch_compat import kernel_settings

_RULES = 1
"""A version to raise whenever what is measured changes."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one kind of operator takes.

    Attributes:
        operator: its name, the same in place and elsewhere.
        work: what it does.
        seconds: the median of some runs.
    """

    operator: str
    work: Work
    seconds: float


Kind: TypeAlias = str

Measurements: TypeAlias = Mapping[Kind, Measurement]


def read_measurements(device: torch.device) -> dict[Kind, Measurement]:
    """Return what is known of a device's kernels; with a warning without what cannot be read."""
    path = _path(device)
    if path is None:
        return {}
    return dict(disk_cache.read_lines(path, _read))


def keep_measurements(device: torch.device, measurements: Measurements) -> None:
    """Add measurements to what is known of a device's kernels."""
    path = _path(device)
    if path is None or not measurements:
        return
    disk_cache.add_lines(path, [_line(kind, measured) for kind, measured in measurements.items()])


def _line(kind: Kind, measured: Measurement) -> list[object]:
    work = measured.work
    dtype = str(work.dtype).removeprefix("torch.")
    return [kind, measured.operator, work.flops, dtype, work.moved_bytes, measured.seconds]


def _read(line: Sequence[Any]) -> tuple[Kind, Measurement]:
    kind, operator, flops, dtype, moved_bytes, seconds = line
    work = Work(int(flops), getattr(torch, dtype), int(moved_bytes))
    return str(kind), Measurement(str(operator), work, float(seconds))


def _path(device: torch.device) -> Path | None:
    folder = disk_cache.cache_folder()
    if folder is None:
        return None
    key = {
        "rules": _RULES,
        "torch": torch.__version__,
        "machine": disk_cache.machine_of(device),
        "settings": repr(kernel_settings()),
        "precision": torch.get_float32_matmul_precision(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "costs" / f"{digest[:32]}.jsonl"
