"""The problem that is planned: the dataflow graph G = (V, E) of OLLA §3.1, checked.

Lifetimes follow from the order alone: with ``position`` the timestep of each operator, a planned array lives
from its producer's timestep to just after its last consumer's, ``[first, last + 1)``; one that nobody
reads lives ``[first, first + 1)``.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olla_solvers.arrays import Array, ArrayKind, Bytes, Offset, Operator, OperatorIndex, Timestep
from olla_solvers.errors import ProblemError
from olla_solvers.problem_json import graph_from_json, graph_to_json, read_document

if TYPE_CHECKING:
    import networkx

__all__ = ["Array", "ArrayKind", "Bytes", "Offset", "Operator", "OperatorIndex", "Problem", "Timestep"]

MOST_BYTES = 2**62
"""All sizes together stay below, so that sums of them fit 64 bits."""


@dataclass(frozen=True)
class Problem:
    """A dataflow graph to order and place. Checked when made.

    Attributes:
        operators: in captured order. Files may list them in any sequence;
            :attr:`captured_order` is executable.
        arrays: every storage, of all kinds.
        before: pairs (u, v): operator u runs before operator v although v reads nothing of u's.
        copies: pairs (u, v): operator u begins to copy an array into another, which it makes, and operator
            v, which reads both, waits until that is done. Others run meanwhile.

    Raises:
        ProblemError: if a name is repeated, an index or a size is wrong, a copy has no arrays, or there is a
            cycle.
    """

    operators: tuple[Operator, ...]
    arrays: tuple[Array, ...]
    before: tuple[tuple[OperatorIndex, OperatorIndex], ...] = ()
    copies: tuple[tuple[OperatorIndex, OperatorIndex], ...] = ()

    def __post_init__(self) -> None:
        """Check names, indices, sizes and acyclicity once."""
        _check_operators(self.operators)
        _check_arrays(self.arrays, self.operators)
        _check_total(self.operators, self.arrays)
        _check_before(self.before, self.operators)
        _check_copies(self.copies, self.arrays, self.operators)
        if len(self.captured_order) < len(self.operators):
            raise ProblemError(f"the operators form a cycle: {self._cycle()}")

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
        lists: list[list[int]] = [[] for _ in self.operators]
        for earlier, later in self.edges:
            lists[later].append(earlier)
        return tuple(map(tuple, lists))

    @cached_property
    def successors(self) -> tuple[tuple[OperatorIndex, ...], ...]:
        """For each operator, those it has an edge to, ascending."""
        lists: list[list[int]] = [[] for _ in self.operators]
        for earlier, later in self.edges:
            lists[earlier].append(later)
        return tuple(map(tuple, lists))

    @cached_property
    def captured_order(self) -> tuple[OperatorIndex, ...]:
        """The operators as listed or, if that is not executable, the nearest order that is.

        Of all topological orders it is the smallest in dictionary order.
        """
        missing = [len(direct) for direct in self.predecessors]
        ready = [operator for operator, count in enumerate(missing) if count == 0]
        order: list[OperatorIndex] = []
        while ready:
            operator = heapq.heappop(ready)
            order.append(operator)
            for successor in self.successors[operator]:
                missing[successor] -= 1
                if missing[successor] == 0:
                    heapq.heappush(ready, successor)
        return tuple(order)

    @cached_property
    def planned(self) -> tuple[Array, ...]:
        """The arrays that live in the buffer."""
        return tuple(array for array in self.arrays if array.kind is ArrayKind.PLANNED)

    @cached_property
    def on_host(self) -> tuple[Array, ...]:
        """The arrays that live in the host's buffer."""
        return tuple(array for array in self.arrays if array.kind is ArrayKind.HOST)

    @cached_property
    def static_bytes(self) -> Bytes:
        """Sum of the static arrays' sizes."""
        return sum(array.size_bytes for array in self.arrays if array.kind is ArrayKind.STATIC)

    def resized(self, array_bytes: Sequence[Bytes], workspace_bytes: Sequence[Bytes]) -> Problem:
        """Return the same graph with other sizes; what depends on its structure alone is not computed again.

        Args:
            array_bytes: the size of each array, rounded up to its alignment.
            workspace_bytes: the workspace of each operator.

        Raises:
            ProblemError: if a size is negative, or all together are too large.
        """
        operators = tuple(
            operator if operator.workspace_bytes == size else Operator(operator.name, size)
            for operator, size in zip(self.operators, workspace_bytes, strict=True)
        )
        arrays = tuple(
            array
            if array.size_bytes == size
            else Array(array.name, size, array.producer, array.consumers, array.kind, array.alignment)
            for array, size in zip(self.arrays, array_bytes, strict=True)
        )
        if min(*array_bytes, *workspace_bytes, 0, 0) < 0:
            raise ProblemError("an array or a workspace has a negative size")
        _check_total(operators, arrays)
        structure = {
            name: getattr(self, name)
            for name in ("before", "copies", "edges", "predecessors", "successors", "captured_order")
        }
        problem = object.__new__(Problem)
        problem.__dict__.update(structure, operators=operators, arrays=arrays)
        return problem

    def indices_of(self, names: Iterable[str]) -> list[OperatorIndex]:
        """Return the operators of some names, in the same sequence.

        Raises:
            KeyError: if there is no operator of a name.
        """
        index = {operator.name: position for position, operator in enumerate(self.operators)}
        return [index[name] for name in names]

    def is_executable(self, order: Sequence[OperatorIndex]) -> bool:
        """Return True if an order runs every operator once, and after all that it needs."""
        position = {operator: timestep for timestep, operator in enumerate(order)}
        return sorted(order) == list(range(len(self.operators))) and all(
            position[earlier] < position[later] for earlier, later in self.edges
        )

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON-ready dictionaries; operators are referred to by name."""
        return graph_to_json(self.operators, self.arrays, self.before, self.copies)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Problem:
        """Read what :meth:`to_json` writes.

        Raises:
            ProblemError: if a field is missing, of the wrong type, unknown, or names an unknown item.
        """
        return cls(*graph_from_json(document))

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read a graph file, or the graph in the file of a plan, under ``problem``.

        Raises:
            ProblemError: if the file is no JSON or no valid graph; the message names the file.
        """
        try:
            document = read_document(path)
            is_plan = isinstance(document, Mapping) and "problem" in document
            return cls.from_json(document["problem"] if is_plan else document)
        except ProblemError as error:
            raise ProblemError(f"{path}: {error}") from error

    def to_networkx(self) -> networkx.DiGraph:
        """Return a graph to look at, with a node for each operator and each array; it tells no copies.

        Nodes are ``("operator", name)`` and ``("array", name)``, with the fields of :class:`Operator` and
        :class:`Array` as attributes. Edges lead from an operator to the arrays it makes, from an array to the
        operators that read it, and from operator to operator for ``before``.
        """
        import networkx

        graph = networkx.DiGraph()
        names = [("operator", operator.name) for operator in self.operators]
        for node, operator in zip(names, self.operators, strict=True):
            graph.add_node(node, workspace_bytes=operator.workspace_bytes)
        for array in self.arrays:
            fields = asdict(array)
            node = ("array", fields.pop("name"))
            producer, consumers = fields.pop("producer"), fields.pop("consumers")
            graph.add_node(node, **fields)
            if producer is not None:
                graph.add_edge(names[producer], node)
            graph.add_edges_from((node, names[consumer]) for consumer in consumers)
        graph.add_edges_from((names[earlier], names[later]) for earlier, later in self.before)
        return graph

    @classmethod
    def from_networkx(cls, graph: networkx.DiGraph) -> Problem:
        """Read what :meth:`to_networkx` makes.

        Args:
            graph: its nodes in the sequence that the problem's operators and arrays shall have.

        Returns:
            The problem; ``before`` is sorted, without repetition.

        Raises:
            ProblemError: if a node is neither an operator nor an array, has a wrong attribute or two
                producers, or if the graph is no valid problem.
        """
        attributes: dict[str, dict[str, dict[str, Any]]] = {"operator": {}, "array": {}}
        for node, fields in graph.nodes.items():
            kind, name = node if isinstance(node, tuple) and len(node) == 2 else (None, None)
            if kind not in attributes or not isinstance(name, str):
                raise ProblemError(f"node {node!r} is neither ('operator', name) nor ('array', name)")
            attributes[kind][name] = dict(fields)
        index = {name: position for position, name in enumerate(attributes["operator"])}
        producers: dict[str, OperatorIndex] = {}
        consumers: dict[str, list[OperatorIndex]] = {name: [] for name in attributes["array"]}
        before = []
        for (tail_kind, tail), (head_kind, head) in graph.edges:
            if tail_kind == head_kind == "operator":
                before.append((index[tail], index[head]))
            elif tail_kind == head_kind or (head_kind == "array" and head in producers):
                raise ProblemError(f"array {head!r} is made by array {tail!r}, or by two operators")
            elif head_kind == "array":
                producers[head] = index[tail]
            else:
                consumers[tail].append(index[head])
        try:
            operators = [Operator(name, **fields) for name, fields in attributes["operator"].items()]
            arrays = [
                Array(name, producer=producers.get(name), consumers=tuple(sorted(consumers[name])), **fields)
                for name, fields in attributes["array"].items()
            ]
        except TypeError as error:
            raise ProblemError(f"a node has a wrong attribute: {error}") from error
        return cls(tuple(operators), tuple(arrays), tuple(sorted(before)))

    def _cycle(self) -> str:
        import networkx

        steps = [earlier for earlier, _ in networkx.find_cycle(networkx.DiGraph(self.edges))]
        return " -> ".join(repr(self.operators[operator].name) for operator in (*steps, steps[0]))


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


def _check_arrays(arrays: Sequence[Array], operators: Sequence[Operator]) -> None:
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
        if any(not 0 <= operator < len(operators) for operator in used):
            raise ProblemError(f"array {array.name!r} refers to an operator that does not exist")
        if any(a >= b for a, b in zip(array.consumers, array.consumers[1:], strict=False)):
            raise ProblemError(f"array {array.name!r}: consumers must ascend without repetition")
        if array.producer is not None and array.producer in array.consumers:
            name = operators[array.producer].name
            raise ProblemError(f"array {array.name!r} is read by its own producer {name!r}")


def _check_total(operators: Sequence[Operator], arrays: Sequence[Array]) -> None:
    total = sum(array.size_bytes for array in arrays) + sum(item.workspace_bytes for item in operators)
    if total >= MOST_BYTES:
        sizes = {f"array {array.name!r}": array.size_bytes for array in arrays}
        sizes |= {f"the workspace of operator {item.name!r}": item.workspace_bytes for item in operators}
        largest = max(sizes, key=lambda name: sizes[name])
        raise ProblemError(
            f"all sizes together reach 2**62 B; the largest is that of {largest}, {sizes[largest]} B"
        )


def _check_copies(
    copies: Sequence[tuple[int, int]], arrays: Sequence[Array], operators: Sequence[Operator]
) -> None:
    if any(not 0 <= operator < len(operators) for pair in copies for operator in pair):
        raise ProblemError("a copy refers to an operator that does not exist")
    made: dict[int, list[Array]] = {begin: [] for begin, _ in copies}
    read: dict[int, list[Array]] = {begin: [] for begin, _ in copies}
    for array in arrays:
        if array.producer in made:
            made[array.producer].append(array)
        for reader in array.consumers:
            if reader in read:
                read[reader].append(array)
    for begin, wait in copies:
        is_read_by_both = any(wait in array.consumers for array in read[begin])
        if len(made[begin]) != 1 or wait not in made[begin][0].consumers or not is_read_by_both:
            raise ProblemError(
                f"operators {operators[begin].name!r} and {operators[wait].name!r} are no copy: the first "
                "makes one array of another, and the second reads both"
            )


def _check_before(before: Sequence[tuple[int, int]], operators: Sequence[Operator]) -> None:
    for earlier, later in before:
        if not (0 <= earlier < len(operators) and 0 <= later < len(operators)):
            raise ProblemError("a before-edge refers to an operator that does not exist")
        if earlier == later:
            raise ProblemError(f"operator {operators[earlier].name!r} must run before itself")
