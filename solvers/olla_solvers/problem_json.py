"""Writes and reads graphs: ``{"format": 1, "operators": [...], "arrays": [...], "before": [...]}``.

Graphs in which arrays wait on the host have ``"copies": [...]``, too.

Used by :class:`~olla_solvers.problem.Problem`, which checks what was read. In files, operators are referred
to by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from olla_solvers.arrays import Array, ArrayKind, Operator, OperatorIndex
from olla_solvers.errors import ProblemError

FORMAT = 1

Edge: TypeAlias = tuple[OperatorIndex, OperatorIndex]


def graph_to_json(
    operators: Sequence[Operator],
    arrays: Sequence[Array],
    before: Sequence[Edge],
    copies: Sequence[Edge] = (),
) -> dict[str, Any]:
    """Return a graph as JSON-ready dictionaries."""
    names = [operator.name for operator in operators]
    document = {
        "format": FORMAT,
        "operators": [_operator_to_json(operator) for operator in operators],
        "arrays": [_array_to_json(array, names) for array in arrays],
        "before": [[names[earlier], names[later]] for earlier, later in before],
    }
    if copies:
        document["copies"] = [[names[begin], names[wait]] for begin, wait in copies]
    return document


def graph_from_json(
    document: Mapping[str, Any],
) -> tuple[tuple[Operator, ...], tuple[Array, ...], tuple[Edge, ...], tuple[Edge, ...]]:
    """Read what :func:`graph_to_json` writes.

    Raises:
        ProblemError: if a field is missing, of the wrong type, unknown, or names an unknown item.
    """
    if not isinstance(document, Mapping):
        raise ProblemError(f"a graph must be a JSON object, not {type(document).__name__}")
    if document.get("format") != FORMAT:
        raise ProblemError(f"unknown graph format {document.get('format')!r}; expected {FORMAT}")
    _refuse_unknown(document, {"format", "operators", "arrays", "before", "copies"}, "the graph")
    operators = tuple(_operator_from_json(item) for item in _list(document, "operators"))
    index = {operator.name: position for position, operator in enumerate(operators)}
    arrays = tuple(_array_from_json(item, index) for item in _list(document, "arrays"))
    before, copies = (
        tuple(_edge_from_json(pair, index, f"a pair of {field!r}") for pair in _list(document, field))
        if field in document
        else ()
        for field in ("before", "copies")
    )
    return operators, arrays, before, copies


def read_document(path: str | Path) -> Any:
    """Return a JSON file's content.

    Raises:
        ProblemError: if the file cannot be read, or repeats a field in an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_refuse_repeated)
    except RecursionError as error:
        raise ProblemError("no graph is nested this deeply") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemError(str(error)) from error


def _operator_to_json(operator: Operator) -> dict[str, Any]:
    document: dict[str, Any] = {"name": operator.name}
    if operator.workspace_bytes:
        document["workspace"] = operator.workspace_bytes
    return document


def _array_to_json(array: Array, names: Sequence[str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": array.name,
        "size": array.size_bytes,
        "producer": None if array.producer is None else names[array.producer],
        "consumers": [names[consumer] for consumer in array.consumers],
    }
    if array.kind is not ArrayKind.PLANNED:
        document["kind"] = array.kind.value
    if array.alignment != 1:
        document["alignment"] = array.alignment
    return document


def _operator_from_json(document: Any) -> Operator:
    name = _field(document, "name", str, "an operator")
    _refuse_unknown(document, {"name", "workspace"}, f"operator {name!r}")
    return Operator(name, _field(document, "workspace", int, f"operator {name!r}", 0))


def _array_from_json(document: Any, index: Mapping[str, int]) -> Array:
    name = _field(document, "name", str, "an array")
    label = f"array {name!r}"
    _refuse_unknown(document, {"name", "size", "producer", "consumers", "kind", "alignment"}, label)
    kind = _field(document, "kind", str, label, "planned")
    if kind not in set(ArrayKind):
        raise ProblemError(f"{label}: unknown kind {kind!r}; one of {', '.join(ArrayKind)}")
    producer = document.get("producer")
    return Array(
        name=name,
        size_bytes=_field(document, "size", int, label),
        producer=None if producer is None else _lookup(producer, index, label),
        consumers=tuple(sorted({_lookup(item, index, label) for item in _list(document, "consumers")})),
        kind=ArrayKind(kind),
        alignment=_field(document, "alignment", int, label, 1),
    )


def _edge_from_json(pair: Any, index: Mapping[str, int], label: str) -> Edge:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ProblemError(f"{label} must be a pair of operator names, not {pair!r}")
    return _lookup(pair[0], index, label), _lookup(pair[1], index, label)


def _lookup(name: Any, index: Mapping[str, int], label: str) -> int:
    if not isinstance(name, str) or name not in index:
        raise ProblemError(f"{label} names unknown operator {name!r}")
    return index[name]


def _list(document: Mapping[str, Any], field: str) -> list[Any]:
    value = document.get(field)
    if not isinstance(value, list):
        raise ProblemError(f"{document.get('name', 'the graph')}: field {field!r} must be a list")
    return value


def _field(document: Any, field: str, kind: type, label: str, default: Any = None) -> Any:
    if not isinstance(document, Mapping):
        raise ProblemError(f"{label} must be a JSON object, not {document!r}")
    value = document.get(field, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProblemError(f"{label}: field {field!r} must be of type {kind.__name__}, not {value!r}")
    return value


def _refuse_repeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, unless a field occurs twice in it: two producers, for instance."""
    document = dict(pairs)
    if len(document) < len(pairs):
        fields = [field for field, _ in pairs]
        twice = next(field for field in fields if fields.count(field) > 1)
        raise ProblemError(f"field {twice!r} occurs twice in {document.get('name', 'an object')!r}")
    return document


def _refuse_unknown(document: Mapping[str, Any], known: set[str], label: str) -> None:
    unknown = sorted(set(document) - known)
    if unknown:
        raise ProblemError(f"{label} has unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
