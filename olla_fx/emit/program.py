"""Writes an emitted graph as a native program, which calls its operators without Python between them.

A program does what the generated function (:mod:`olla_fx.emit.codegen`) does, value by value: each operator
begins at its timestep, and each value is dropped right after its last use. A call that is no operator of
PyTorch's dispatcher, such as arithmetic of numbers, runs in Python, in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.arena import NativeModule, NativeProgram
from olla_fx.torch_compat import pytree


class NativeFunction:
    """Runs one phase of a step; takes and returns what the generated function does.

    What a phase keeps for the next is a native object here, whose ``values`` are those of the list.
    """

    def __init__(self, native: NativeModule, written: _Written, attributes: Sequence[Any]) -> None:
        """Hold a program.

        Args:
            native: it was written for.
            written: the program.
            attributes: the values of those that the graph reads.
        """
        self._native = native
        self._written = written
        self._attributes = tuple(attributes)
        self._constants = (*attributes, *written.literals)
        self._run = written.program.run

    def with_attributes(self, numbers: Mapping[str, Any]) -> NativeFunction:
        """Return the same program of other numbers.

        Args:
            numbers: by the attribute's name.
        """
        pairs = zip(self._written.names, self._attributes, strict=True)
        return NativeFunction(
            self._native, self._written, [numbers.get(name, value) for name, value in pairs]
        )

    def __call__(self, *arguments: Any) -> Any:
        """Run the phase."""
        if self._written.takes_over:
            *values, kept, gradients = arguments
            if not isinstance(
                kept, self._native.Kept
            ):  # a list, of a forward that was interpreted, or copies
                kept = self._native.Kept(kept)
            return self._run((*values, *self._constants), kept, gradients)
        if not self._written.keeps:
            return self._run((*arguments, *self._constants), None, None)
        kept = self._native.Kept()
        return self._run((*arguments, *self._constants), kept, None), kept


def native_functions(
    phases: Sequence[fx.GraphModule],
    constants: nn.Module,
    native: NativeModule,
    begin_operator: Callable[[int], object] | None,
) -> tuple[NativeFunction, ...]:
    """Write the graphs of a step as programs.

    Args:
        phases: from :func:`olla_fx.emit.graph.reordered_graphs`.
        constants: has the attributes that the graphs read.
        native: of the device that they run on.
        begin_operator: what the graphs call before each operator, if anything.
    """
    functions = []
    for index, phase in enumerate(phases):
        writer = _Writer(phase.graph, native, begin_operator)
        written = writer.write(keeps=index + 1 < len(phases), takes_over=index > 0)
        attributes = [operator.attrgetter(name)(constants) for name in written.names]
        functions.append(NativeFunction(native, written, attributes))
    return tuple(functions)


@dataclass(frozen=True, slots=True)
class _Written:
    """A program, which needs the graph no more that it was written from.

    Attributes:
        program: the instructions.
        keeps: True if it leaves something to another phase.
        takes_over: True if it follows another.
        names: of the attributes that the graph reads.
        literals: results that are written in the graph.
    """

    program: NativeProgram
    keeps: bool
    takes_over: bool
    names: tuple[str, ...]
    literals: tuple[Any, ...]


class _Writer:
    """Writes a graph as a program."""

    def __init__(
        self, graph: fx.Graph, native: NativeModule, begin_operator: Callable[[int], object] | None
    ) -> None:
        self._graph = graph
        self._native = native
        self._begin_operator = begin_operator
        self._slots: dict[fx.Node, int] = {}
        self._dead = _last_used_at(graph)
        self._taken: list[int] = []

    def write(self, *, keeps: bool, takes_over: bool) -> _Written:
        """Write all instructions; the arguments are as of :class:`_Written`."""
        nodes = list(self._graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        attributes = [node for node in nodes if node.op == "get_attr"]
        names = tuple(str(node.target) for node in attributes)
        answer: Any = self._graph.output_node().args[0]
        results, kept = answer if keeps else (answer, ())
        literals = tuple(value for value in (*results, *kept) if not isinstance(value, fx.Node))
        # The last two placeholders of a later phase stand for what it takes over, and for its gradients.
        first = [*(placeholders[:-2] if takes_over else placeholders), *attributes]
        self._slots = {node: slot for slot, node in enumerate(first)}
        literal_slots = iter(range(len(first), len(first) + len(literals)))
        slot_count = len(first) + len(literals)
        for node in nodes:
            if node not in self._slots:
                self._slots[node] = slot_count
                slot_count += 1
        self._program: NativeProgram = self._native.Program(slot_count)
        for node in nodes:
            if node.op in ("call_function", "call_method"):
                self._write_call(node)

        def slots_of(values: Iterable[Any]) -> list[int]:
            return [
                self._slots[value] if isinstance(value, fx.Node) else next(literal_slots) for value in values
            ]

        # What is kept is taken from the end.
        self._program.finish(slots_of(results), slots_of(kept), self._taken[::-1])
        return _Written(self._program, keeps, takes_over, names, literals)

    def _write_call(self, node: fx.Node) -> None:
        slot, dead = self._slots[node], self._dead.get(node, [])
        dead_slots = [self._slots[value] for value in dead]
        arguments: Any = node.args
        if node.op == "call_method" and node.target == "pop":
            self._taken.append(slot)
        elif node.op == "call_method" and node.target == "take":
            _, position, gradient, is_made_here = arguments
            self._program.take_gradient(position, self._slots[gradient], is_made_here, dead_slots)
        elif node.op == "call_method":
            raise ValueError(f"{node.name} calls a method, which no planned step does")
        elif node.target is self._begin_operator:
            self._program.begin(arguments[0])
        elif node.target is operator.getitem and isinstance(arguments[1], int):
            self._program.get_item(node.name, self._slots[arguments[0]], arguments[1], slot, dead_slots)
        elif not self._write_operator(node, slot, dead_slots):
            function, sources = _function_of_nodes(node)
            source_slots = [self._slots[source] for source in sources]
            self._program.call_function(node.name, function, source_slots, slot, dead_slots)

    def _write_operator(self, node: fx.Node, slot: int, dead_slots: list[int]) -> bool:
        """Write a call of an operator; return False if the dispatcher does not know it."""
        if not isinstance(node.target, torch_compat.OpOverload):
            return False
        name, overload = torch_compat.dispatched_name(node.target)
        args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), self._slot_of))
        return self._program.call_operator(
            node.name, name, overload, tuple(args), dict(kwargs), slot, dead_slots
        )

    def _slot_of(self, value: fx.Node) -> Any:
        return self._native.Slot(self._slots[value])


def _last_used_at(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that nobody reads after it; those of the output are in no list."""
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        last = [value for value in node.all_input_nodes if value not in seen]
        seen.update(last)
        if node.op == "output":
            continue
        if not node.users:
            last.append(node)
        dead[node] = last
    return dead


def _function_of_nodes(node: fx.Node) -> tuple[Callable[..., Any], list[fx.Node]]:
    """Return a function of the values that a call reads, and the nodes of these."""
    function = torch_compat.direct_call(node.target)
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    if not node.kwargs and places == list(range(len(node.args))):
        return function, leaves
    is_flat = not node.kwargs and len(leaves) == len(node.args)
    sources = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # a node would keep its graph

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        if is_flat:
            return function(*filled)
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    return call, sources
