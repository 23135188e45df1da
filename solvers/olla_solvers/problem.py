"""What is planned: operators, the arrays they make and read, and pure ordering edges.

A :class:`Problem` is the dataflow graph G = (V, E) of OLLA §3.1. Operators are the nodes; every array
is one storage with one producer and any number of consumers, which is why an array, and not an edge,
carries the size. Arrays refer to operators by index; names serve messages and files.

Lifetimes follow the order alone: with ``position`` the timestep of each operator, a planned array lives
from its producer's timestep to just after its last consumer's, ``[first, last + 1)``; one that nobody
reads lives ``[first, first + 1)``.

The JSON form is ``{"format": 1, "operators": [...], "arrays": [...], "before": [...]}``, see
:meth:`Problem.to_json`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from olla_solvers.errors import ProblemError

Bytes: TypeAlias = int
Timestep: TypeAlias = int
Offset: TypeAlias = int
OperatorIndex: TypeAlias = int

FORMAT = 1

MOST_BYTES = 2**62
"""All sizes together stay below, so that sums of them fit 64 bits."""


class ArrayKind(enum.StrEnum):
    """Who owns an array's memory.

    ``PLANNED`` arrays live in the buffer, ``STATIC`` ones belong to the caller and are alive all the
    time, ``OUTPUT`` ones are made by the step and handed to the caller, outside the buffer.
    """

    PLANNED = "planned"
    STATIC = "static"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Operator:
    """One computation.

    Attributes:
        name: unique in its problem.
        workspace_bytes: bytes that live and die inside this operator, beside its inputs and outputs.
    """

    name: str
    workspace_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Array:
    """One storage.

    Attributes:
        name: unique in its problem.
        size_bytes: size, already rounded up to the device's alignment.
        producer: index of the operator that makes it; None only for static arrays.
        consumers: indices of the operators that read it, ascending, without repetition.
        kind: who owns its memory.
        alignment: the offset must be a multiple of this many bytes.
        may_share: names of arrays at whose address this one may be put if they die where it is born.
    """

    name: str
    size_bytes: Bytes
    producer: OperatorIndex | None
    consumers: tuple[OperatorIndex, ...] = ()
    kind: ArrayKind = ArrayKind.PLANNED
    alignment: int = 1
    may_share: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A dataflow graph to order and place. Checked when made.

    Attributes:
        operators: in captured order, which must be executable.
            (An order that respects every edge exists for any valid problem; files may list
            operators in any sequence.)
        arrays: every storage, of all kinds.
        before: pairs (u, v): operator u runs before operator v although v reads nothing of u's.

    Raises:
        ProblemError: on a repeated name, a bad index or size, or a cycle.
    """

    operators: tuple[Operator, ...]
    arrays: tuple[Array, ...]
    before: tuple[tuple[OperatorIndex, OperatorIndex], ...] = ()

    def __post_init__(self) -> None:
        """Check names, indices, sizes and acyclicity once, at the door."""
        _check_operators(self.operators)
        _check_arrays(self.arrays, len(self.operators), self.operators)
        _check_total(self.operators, self.arrays)
        _check_before(self.before, self.operators)
        _check_acyclic(self)

    @cached_property
    def edges(self) -> tuple[tuple[OperatorIndex, OperatorIndex], ...]:
        """All precedences (u, v), u before v, from arrays and ``before``; sorted, no repetition."""
        pairs = set(self.before)
        for array in self.arrays:
            if array.producer is not None:
                pairs.update((array.producer, consumer) for consumer in array.consumers)
        return tuple(sorted(pairs))

    @cached_property
    def predecessors(self) -> tuple[tuple[OperatorIndex, ...], ...]:
        """For each operator, those with an edge to it, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for earlier, later in self.edges:
            found[later].append(earlier)
        return tuple(tuple(each) for each in found)

    @cached_property
    def successors(self) -> tuple[tuple[OperatorIndex, ...], ...]:
        """For each operator, those it has an edge to, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for earlier, later in self.edges:
            found[earlier].append(later)
        return tuple(tuple(each) for each in found)

    @cached_property
    def planned(self) -> tuple[Array, ...]:
        """The arrays that live in the buffer."""
        return tuple(array for array in self.arrays if array.kind is ArrayKind.PLANNED)

    @cached_property
    def static_bytes(self) -> Bytes:
        """Sum of the static arrays' sizes."""
        return sum(array.size_bytes for array in self.arrays if array.kind is ArrayKind.STATIC)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON-ready dictionaries; operators are referred to by name."""
        names = [operator.name for operator in self.operators]
        return {
            "format": FORMAT,
            "operators": [_operator_to_json(operator) for operator in self.operators],
            "arrays": [_array_to_json(array, names) for array in self.arrays],
            "before": [[names[earlier], names[later]] for earlier, later in self.before],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Problem:
        """Read what :meth:`to_json` writes.

        Raises:
            ProblemError: when a field is missing, of the wrong type, unknown, or names an unknown item.
        """
        if not isinstance(document, Mapping):
            raise ProblemError(f"a graph must be a JSON object, not {type(document).__name__}")
        if document.get("format") != FORMAT:
            raise ProblemError(f"unknown graph format {document.get('format')!r}; expected {FORMAT}")
        _refuse_unknown(document, {"format", "operators", "arrays", "before"}, "the graph")
        operators = tuple(_operator_from_json(each) for each in _list(document, "operators"))
        index = {operator.name: position for position, operator in enumerate(operators)}
        arrays = tuple(_array_from_json(each, index) for each in _list(document, "arrays"))
        edges = _list(document, "before") if "before" in document else []
        before = tuple(_pair_from_json(each, index) for each in edges)
        return cls(operators, arrays, before)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read a graph file.

        Raises:
            ProblemError: when the file is no JSON or no valid graph; the message names the file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_json(json.loads(text, object_pairs_hook=_refuse_repeated))
        except RecursionError as error:
            raise ProblemError(f"{path}: no graph is nested this deeply") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, ProblemError) as error:
            raise ProblemError(f"{path}: {error}") from error


def _check_operators(operators: Sequence[Operator]) -> None:
    seen: set[str] = set()
    for operator in operators:
        if operator.name in seen:
            raise ProblemError(f"operator {operator.name!r} occurs twice")
        seen.add(operator.name)
        if operator.workspace_bytes < 0:
            raise ProblemError(
                f"operator {operator.name!r} has a negative workspace ({operator.workspace_bytes} B)"
            )


def _check_arrays(arrays: Sequence[Array], count: int, operators: Sequence[Operator]) -> None:
    names = {array.name for array in arrays}
    seen: set[str] = set()
    for array in arrays:
        if array.name in seen:
            raise ProblemError(f"array {array.name!r} occurs twice")
        seen.add(array.name)
        if array.size_bytes < 0:
            raise ProblemError(f"array {array.name!r} has a negative size ({array.size_bytes} B)")
        if array.alignment < 1:
            raise ProblemError(f"array {array.name!r} has alignment {array.alignment}, below 1")
        if array.producer is None and array.kind is not ArrayKind.STATIC:
            raise ProblemError(f"{array.kind} array {array.name!r} has no producer")
        used = (*array.consumers, *(() if array.producer is None else (array.producer,)))
        if any(not 0 <= operator < count for operator in used):
            raise ProblemError(f"array {array.name!r} refers to an operator that does not exist")
        if any(a >= b for a, b in zip(array.consumers, array.consumers[1:], strict=False)):
            raise ProblemError(f"array {array.name!r}: consumers must ascend without repetition")
        if array.producer in array.consumers:
            name = operators[array.producer].name if array.producer is not None else ""
            raise ProblemError(f"array {array.name!r} is read by its own producer {name!r}")
        unknown = next((other for other in array.may_share if other not in names), None)
        if unknown is not None:
            raise ProblemError(f"array {array.name!r} may share with unknown array {unknown!r}")


def _check_total(operators: Sequence[Operator], arrays: Sequence[Array]) -> None:
    sizes = {f"array {array.name!r}": array.size_bytes for array in arrays}
    sizes |= {f"the workspace of operator {each.name!r}": each.workspace_bytes for each in operators}
    if sum(sizes.values()) >= MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ProblemError(
            f"all sizes together reach 2**62 B; the largest is that of {largest}, {sizes[largest]} B"
        )


def _check_before(before: Sequence[tuple[int, int]], operators: Sequence[Operator]) -> None:
    for earlier, later in before:
        if not (0 <= earlier < len(operators) and 0 <= later < len(operators)):
            raise ProblemError("a before-edge refers to an operator that does not exist")
        if earlier == later:
            raise ProblemError(f"operator {operators[earlier].name!r} must run before itself")


def _check_acyclic(problem: Problem) -> None:
    waiting = [len(each) for each in problem.predecessors]
    ready = [operator for operator, missing in enumerate(waiting) if missing == 0]
    done = 0
    while ready:
        operator = ready.pop()
        done += 1
        for successor in problem.successors[operator]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    if done < len(problem.operators):
        stuck = next(operator for operator, missing in enumerate(waiting) if missing > 0)
        cycle = _cycle_through(problem, stuck, waiting)
        path = " -> ".join(repr(problem.operators[operator].name) for operator in cycle)
        raise ProblemError(f"the operators form a cycle: {path}")


def _cycle_through(problem: Problem, start: int, waiting: Sequence[int]) -> list[int]:
    """Walk back over operators that never became ready until one repeats."""
    seen: dict[int, int] = {}
    walk: list[int] = []
    operator = start
    while operator not in seen:
        seen[operator] = len(walk)
        walk.append(operator)
        operator = next(each for each in problem.predecessors[operator] if waiting[each] > 0)
    return [operator, *reversed(walk[seen[operator] :])]


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
    if array.may_share:
        document["may_share"] = list(array.may_share)
    return document


def _operator_from_json(document: Any) -> Operator:
    name = _field(document, "name", str, "an operator")
    _refuse_unknown(document, {"name", "workspace"}, f"operator {name!r}")
    return Operator(name, _field(document, "workspace", int, f"operator {name!r}", 0))


def _array_from_json(document: Any, index: Mapping[str, int]) -> Array:
    name = _field(document, "name", str, "an array")
    where = f"array {name!r}"
    known = {"name", "size", "producer", "consumers", "kind", "alignment", "may_share"}
    _refuse_unknown(document, known, where)
    kind = _field(document, "kind", str, where, "planned")
    if kind not in set(ArrayKind):
        raise ProblemError(f"{where}: unknown kind {kind!r}; one of {', '.join(ArrayKind)}")
    producer = document.get("producer")
    return Array(
        name=name,
        size_bytes=_field(document, "size", int, where),
        producer=None if producer is None else _lookup(producer, index, where),
        consumers=tuple(sorted({_lookup(each, index, where) for each in _list(document, "consumers")})),
        kind=ArrayKind(kind),
        alignment=_field(document, "alignment", int, where, 1),
        may_share=_names(document, "may_share", where),
    )


def _pair_from_json(pair: Any, index: Mapping[str, int]) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ProblemError(f"a before-edge must be a pair of operator names, not {pair!r}")
    return _lookup(pair[0], index, "a before-edge"), _lookup(pair[1], index, "a before-edge")


def _lookup(name: Any, index: Mapping[str, int], where: str) -> int:
    if not isinstance(name, str) or name not in index:
        raise ProblemError(f"{where} names unknown operator {name!r}")
    return index[name]


def _list(document: Mapping[str, Any], field: str) -> list[Any]:
    value = document.get(field)
    if not isinstance(value, list):
        where = document.get("name", "the graph")
        raise ProblemError(f"{where}: field {field!r} must be a list")
    return value


def _names(document: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    names = document.get(field, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ProblemError(f"{where}: field {field!r} must be a list of names, not {names!r}")
    return tuple(names)


def _field(document: Any, field: str, kind: type, where: str, default: Any = None) -> Any:
    if not isinstance(document, Mapping):
        raise ProblemError(f"{where} must be a JSON object, not {document!r}")
    value = document.get(field, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProblemError(f"{where}: field {field!r} must be of type {kind.__name__}, not {value!r}")
    return value


def _refuse_repeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a field occurs twice in it: two producers, for instance."""
    document = dict(pairs)
    if len(document) < len(pairs):
        fields = [field for field, _ in pairs]
        twice = next(field for field in fields if fields.count(field) > 1)
        raise ProblemError(f"field {twice!r} occurs twice in {document.get('name', 'an object')!r}")
    return document


def _refuse_unknown(document: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(document) - known)
    if unknown:
        raise ProblemError(f"{where} has unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
