"""Writes and reads whole plans as JSON: order, offsets, figures and provenance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olla_solvers.effort.progress import Improvement
from olla_solvers.errors import ProblemError
from olla_solvers.plan import MemoryPlan, Provenance, SolverEffect, SolverReport, SolverStatus

PLAN_FORMAT = 1

_DERIVED = {"is_optimal", "fragmentation"}
"""Figures that are written for readers of the file and computed anew from the others."""


def plan_to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan as JSON-ready dictionaries.

    Args:
        plan: any plan.

    Returns:
        All its fields by name, and ``is_optimal`` and ``fragmentation``; stage times are in ``seconds``.
    """
    return {
        "format": PLAN_FORMAT,
        "order": list(plan.order),
        "offsets": dict(plan.offsets),
        "workspace_offsets": dict(plan.workspace_offsets),
        "buffer_bytes": plan.buffer_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "is_optimal": plan.is_optimal,
        "fragmentation": plan.fragmentation,
        "provenance": dataclasses.asdict(plan.provenance),
        "seconds": dict(plan.timings),
        "progress": {
            stage: [dataclasses.asdict(improvement) for improvement in improvements]
            for stage, improvements in plan.progress.items()
        },
        "host_offsets": dict(plan.host_offsets),
        "host_bytes": plan.host_bytes,
    }


def plan_from_json(document: Mapping[str, Any]) -> MemoryPlan:
    """Read what :func:`plan_to_json` writes.

    Args:
        document: the parsed JSON.

    Returns:
        The plan. :func:`~olla_solvers.validate.validate` checks it against its problem.

    Raises:
        ProblemError: if a field is missing, unknown or of the wrong type.
    """
    if not isinstance(document, Mapping):
        raise ProblemError(f"a plan must be a JSON object, not {type(document).__name__}")
    if document.get("format") != PLAN_FORMAT:
        raise ProblemError(f"unknown plan format {document.get('format')!r}; expected {PLAN_FORMAT}")
    fields = {
        "order",
        "offsets",
        "workspace_offsets",
        "buffer_bytes",
        "peak_bytes",
        "lower_bound_bytes",
        "provenance",
        "seconds",
    }
    # Plans of earlier versions have neither progress nor arrays on the host.
    later = {"format", "progress", "host_offsets", "host_bytes"}
    _check_fields(document, fields, _DERIVED | later, "the plan")
    return MemoryPlan(
        order=tuple(_items(document["order"], str, "order")),
        offsets=_mapping(document["offsets"], (int,), "offsets"),
        workspace_offsets=_mapping(document["workspace_offsets"], (int,), "workspace_offsets"),
        buffer_bytes=_typed(document["buffer_bytes"], (int,), "buffer_bytes"),
        peak_bytes=_typed(document["peak_bytes"], (int,), "peak_bytes"),
        lower_bound_bytes=_typed(document["lower_bound_bytes"], (int,), "lower_bound_bytes"),
        provenance=_provenance(document["provenance"]),
        timings=_mapping(document["seconds"], (int, float), "seconds"),
        progress={
            stage: tuple(_improvement(improvement) for improvement in improvements)
            for stage, improvements in _mapping(document.get("progress", {}), (list,), "progress").items()
        },
        host_offsets=_mapping(document.get("host_offsets", {}), (int,), "host_offsets"),
        host_bytes=_typed(document.get("host_bytes", 0), (int,), "host_bytes"),
    )


def save_plan(plan: MemoryPlan, path: str | Path) -> None:
    """Write a plan to a JSON file."""
    Path(path).write_text(json.dumps(plan_to_json(plan)), encoding="utf-8")


def load_plan(path: str | Path) -> MemoryPlan:
    """Read a plan file.

    Raises:
        ProblemError: if the file is no JSON or no plan; the message names the file.
    """
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ProblemError) as error:
        raise ProblemError(f"{path}: {error}") from error


def _provenance(document: Any) -> Provenance:
    names = {field.name for field in dataclasses.fields(Provenance)}
    words = {name for name in names if not name.endswith("_solver")}
    _check_fields(document, names, set(), "the plan's provenance")
    fields: dict[str, Any] = {name: _typed(document[name], (str, type(None)), name) for name in words}
    for name in names - words:
        fields[name] = _report(document[name], name)
    return Provenance(**fields)


def _report(document: Any, label: str) -> SolverReport:
    names = {field.name for field in dataclasses.fields(SolverReport)}
    _check_fields(document, names, set(), label)
    try:
        status, effect = SolverStatus(document["status"]), SolverEffect(document["effect"])
    except ValueError as error:
        raise ProblemError(f"{label}: {error}") from error
    return SolverReport(**{**document, "status": status, "effect": effect})


def _improvement(document: Any) -> Improvement:
    names = {field.name for field in dataclasses.fields(Improvement)}
    _check_fields(document, names, set(), "progress")
    return Improvement(
        seconds=_typed(document["seconds"], (int, float), "seconds"),
        value_bytes=_typed(document["value_bytes"], (int,), "value_bytes"),
        bound_bytes=_typed(document["bound_bytes"], (int,), "bound_bytes"),
        method=_typed(document["method"], (str,), "method"),
    )


def _check_fields(document: Any, needed: set[str], also: set[str], label: str) -> None:
    if not isinstance(document, Mapping):
        raise ProblemError(f"{label} must be a JSON object, not {document!r}")
    for name in sorted(needed - set(document)):
        raise ProblemError(f"{label} lacks field {name!r}")
    for name in sorted(set(document) - needed - also):
        raise ProblemError(f"{label} has unknown field {name!r}")


def _typed(value: Any, kinds: tuple[type, ...], label: str) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ProblemError(f"field {label!r} must be of type {expected}, not {value!r}")
    return value


def _items(values: Any, kind: type, label: str) -> list[Any]:
    return [_typed(value, (kind,), label) for value in _typed(values, (list,), label)]


def _mapping(values: Any, kinds: tuple[type, ...], label: str) -> dict[str, Any]:
    return {name: _typed(value, kinds, label) for name, value in _typed(values, (dict,), label).items()}
