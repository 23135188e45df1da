"""Reads a :class:`~olla_solvers.problem.Problem` off an fx graph.

Nodes that compute become operators, storages become arrays. Which tensors share a storage is read off
the fake tensors that the graph was propagated with, never off operator names: ``reshape`` may or may
not copy. Everything else (views, ``getitem``, Python arithmetic on scalars) is *free*: it takes no
memory and is emitted right before its first user.

Edges beyond producer → consumer are hazards, found by walking the captured order, which is the
step's meaning: a write waits for the last write and for every read since; a read waits for the last
write. Operators that draw random numbers keep their order among themselves.

A step that raises leaves what eager leaves, since effects and operators that may raise
(:func:`olla_fx.fx_graph.may_raise`) keep their captured order (:mod:`olla_fx.effect_order`).

A graph in which arrays wait on the host (:mod:`olla_fx.passes.transfers`) runs in its own sequence, in which
that was planned: each operator waits for the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from olla_fx.alignment import alignment_of, rounded
from olla_fx.effect_order import edges_between_effects
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import (
    draws_random_numbers,
    end_of_backward,
    forward_backward_boundary,
    is_free,
    is_on,
    may_raise,
    storages_of,
    written_arguments,
)
from olla_fx.link import is_transfer, offload, waits_for
from olla_fx.torch_compat import pytree, storage_key
from olla_solvers.problem import Array, ArrayKind, Operator, Problem


@dataclass(frozen=True)
class GradientsInBuffer:
    """Positions of the gradients of a step in the caller's own loop that are made in the buffer.

    All others are allocated outside and handed to the caller.

    Attributes:
        kept: become ``.grad`` there: they are alive until the backward ends.
        added: are added to a ``.grad`` that is outside as soon as they are made.
    """

    kept: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Dataflow:
    """A graph seen as operators and arrays.

    Attributes:
        graph_module: the graph; every node carries its fake value in ``meta["val"]``.
        problem: operators in captured order.
        operators: the node of each operator.
        produced: for each operator, the array index of each of its flattened results; None for a result
            that is no tensor, lives in another operator's storage, on another device, or on the host.
        storage_bytes: each array's size before rounding; of one on the host, too.
        alignment_bytes: sizes are rounded up to multiples of it.
        device: the device that the graph runs on.
        gradients: those that are made in the buffer.
    """

    graph_module: fx.GraphModule
    problem: Problem
    operators: tuple[fx.Node, ...]
    produced: tuple[tuple[int | None, ...], ...]
    storage_bytes: tuple[int, ...]
    alignment_bytes: int
    device: torch.device
    gradients: GradientsInBuffer


def build_dataflow(
    graph_module: fx.GraphModule, device: torch.device, gradients: GradientsInBuffer | None = None
) -> Dataflow:
    """Read operators, arrays and hazards off a graph.

    Args:
        graph_module: propagated with fake tensors
            (:func:`olla_fx.passes.propagate.propagate_fake_tensors`).
        device: sizes are rounded up to its alignment.
        gradients: those to make in the buffer; None for none.

    Returns:
        The problem, and which node and result each of its items is.

    Raises:
        CaptureError: if the graph holds a construct whose memory is unknown.
    """
    builder = _Builder(graph_module, device, gradients or GradientsInBuffer())
    for node in graph_module.graph.nodes:
        builder.add(node)
    return builder.finish()


@dataclass
class _Storage:
    """One storage, as far as the walk over the graph has come."""

    name: str
    size_bytes: int
    producer: int | None
    users: set[int]
    last_writer: int | None
    readers_since_write: set[int]
    on_device: bool
    is_output: bool = False
    on_host: bool = False


class _Builder:
    """Walks a graph once, in captured order."""

    def __init__(
        self, graph_module: fx.GraphModule, device: torch.device, gradients: GradientsInBuffer
    ) -> None:
        self.graph_module = graph_module
        self.device = device
        self.gradients = gradients
        self.alignment_bytes = alignment_of(device)
        self.operators: list[fx.Node] = []
        self.results: list[list[int | None]] = []
        self.storages: dict[int, _Storage] = {}
        self.before: set[tuple[int, int]] = set()
        self.number_sources: dict[fx.Node, frozenset[int]] = {}
        self.last_random: int | None = None
        self.tied: list[int] = []
        self.boundary: int | None = None
        self.outputs: set[int | None] = set()
        self.static_writers: set[int] = set()
        self.delivering: set[int] = set()
        self.copies: list[tuple[int, int]] = []
        self.has_transfers = False

    def add(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            for key, leaf in _tensor_leaves(node.meta.get("val")):
                self._new_storage(key, node.name, leaf, None)
        elif node.op == "output":
            for argument in self._returned(node):
                for returned in storages_of(argument.meta.get("val")):
                    if returned is not None:
                        self._deliver(self.storages[returned])
        elif node.target is forward_backward_boundary:
            self._add_boundary(node)
        elif node.target is end_of_backward:
            self._add_end(node)
        elif is_free(node):
            self.number_sources[node] = self._numbers_of(node)
        else:
            self._add_operator(node)

    def _deliver(self, storage: _Storage) -> None:
        storage.is_output = True
        if storage.producer is not None and self.boundary is None:
            self.delivering.add(storage.producer)

    def _returned(self, output: fx.Node) -> Iterator[fx.Node]:
        """Yield the results that are allocated outside; gradients follow those that the boundary has."""
        results = cast(Sequence[object], output.args[0])
        boundary = next((node for node in self.operators if node.target is forward_backward_boundary), None)
        before = 0 if boundary is None else len(cast(Sequence[object], boundary.args[0]))
        in_buffer = self.gradients.kept | self.gradients.added
        for index, result in enumerate(results):
            if isinstance(result, fx.Node) and index - before not in in_buffer:
                yield result

    def _add_end(self, node: fx.Node) -> None:
        """Add an operator that reads the gradients that are kept, after all others."""
        index = len(self.operators)
        waited_for = {source for source, _ in self.before}
        waited_for |= {
            storage.producer
            for storage in self.storages.values()
            if storage.producer is not None and storage.users - {storage.producer}
        }
        self.before.update((operator, index) for operator in range(index) if operator not in waited_for)
        self.operators.append(node)
        self.results.append([])
        for position, gradient in enumerate(cast(Sequence[fx.Node], node.args[0])):
            for key in storages_of(gradient.meta.get("val")) if position in self.gradients.kept else ():
                if key is not None:
                    self._read(self.storages[key], index)
        for storage in self.storages.values():
            # A backward may run again, and wants what forward has left on the host.
            if storage.on_host and (storage.producer or 0) < (self.boundary or 0):
                self._read(storage, index)

    def _add_boundary(self, node: fx.Node) -> None:
        """Add an operator that reads the results: what the caller can notice stays on its side."""
        index = self.boundary = len(self.operators)
        self.operators.append(node)
        self.results.append([])
        self.before.update((operator, index) for operator in self.tied)
        self.delivering = {index}
        for result in pytree.tree_leaves(node.args[0]):
            for key in storages_of(result.meta.get("val")) if isinstance(result, fx.Node) else ():
                if key is not None:
                    self.outputs.add(key)
                    self.before.update((user, index) for user in self.storages[key].users if user != index)
                    self._read(self.storages[key], index)

    def _numbers_of(self, node: fx.Node) -> frozenset[int]:
        """Return the operators whose Python numbers reach a node without passing through a tensor."""
        sources: set[int] = set()
        for argument in node.all_input_nodes:
            if not _tensor_leaves(argument.meta.get("val")):
                sources |= self.number_sources.get(argument, frozenset())
        return frozenset(sources)

    def _new_storage(self, key: int, name: str, leaf: torch.Tensor, producer: int | None) -> None:
        if not isinstance(leaf.untyped_storage().nbytes(), int):
            raise CaptureError(
                f"the model has shapes that depend on the values of its tensors (of {name}: a mask or "
                "nonzero, say), so no plan fits every step. Use torch.where or fixed shapes"
            )
        # Numbers on the host (an optimizer's count of steps) take no memory of the device, nor does what
        # the model computes on another one.
        on_device = is_on(leaf, self.device)
        size_bytes = leaf.untyped_storage().nbytes() if on_device else 0
        self.storages[key] = _Storage(name, size_bytes, producer, set(), producer, set(), on_device)

    def _add_operator(self, node: fx.Node) -> None:
        index = len(self.operators)
        self.operators.append(node)
        self.has_transfers |= is_transfer(node)
        begin = waits_for(node)
        if begin is not None:
            self.copies.append((self.operators.index(begin), index))
        self.before.update((source, index) for source in self._numbers_of(node))
        written = {key for target in written_arguments(node) for key in storages_of(target.meta.get("val"))}
        read = {key for source in node.all_input_nodes for key in storages_of(source.meta.get("val"))}
        for key in read - written:
            if key is not None:
                self._read(self.storages[key], index)
        for key in written:
            if key is not None:
                self._write(self.storages[key], index)
        if self._is_static(written):
            self.static_writers.add(index)
        if self._is_the_callers(read) or draws_random_numbers(node):
            self._tie(index)
        self._chain_random(node, index)
        self._add_results(node, index)
        self.number_sources[node] = frozenset({index})

    def _is_the_callers(self, keys: set[int | None]) -> bool:
        """Return True if the caller holds one of some storages between forward and backward."""
        return self._is_static(keys) or not keys.isdisjoint(self.outputs)

    def _is_static(self, keys: set[int | None]) -> bool:
        return any(key is not None and self.storages[key].producer is None for key in keys)

    def _tie(self, index: int) -> None:
        """Keep an operator on its side of the forward/backward boundary."""
        self.tied.append(index)
        if self.boundary is not None:
            self.before.add((self.boundary, index))

    def _read(self, storage: _Storage, index: int) -> None:
        storage.users.add(index)
        storage.readers_since_write.add(index)
        self._after(storage, storage.last_writer, index)

    def _write(self, storage: _Storage, index: int) -> None:
        storage.users.add(index)
        self._after(storage, storage.last_writer, index)
        self.before.update((reader, index) for reader in storage.readers_since_write)
        storage.last_writer, storage.readers_since_write = index, set()

    def _after(self, storage: _Storage, writer: int | None, index: int) -> None:
        if writer is not None and writer != storage.producer:
            self.before.add((writer, index))

    def _chain_random(self, node: fx.Node, index: int) -> None:
        if draws_random_numbers(node):
            if self.last_random is not None:
                self.before.add((self.last_random, index))
            self.last_random = index

    def _add_results(self, node: fx.Node, index: int) -> None:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        results: list[int | None] = []
        for position, leaf in enumerate(leaves):
            key = storage_key(leaf) if isinstance(leaf, torch.Tensor) else None
            if key is not None and key not in self.storages:
                name = node.name if len(leaves) == 1 else f"{node.name}.{position}"
                self._new_storage(key, name, leaf, index)
                if node.target is offload:
                    self.storages[key].size_bytes = leaf.untyped_storage().nbytes()
                    self.storages[key].on_host = True
                    self.storages[key].on_device = False
            elif key is not None and self.storages[key].producer != index:
                key = None
            results.append(key if key is not None and self.storages[key].on_device else None)
        self.results.append(results)

    def _keep_effects_in_order(self) -> None:
        last = max(self.delivering, default=-1)
        checks = {index for index, node in enumerate(self.operators[: last + 1]) if may_raise(node)}
        draws = {index for index, node in enumerate(self.operators) if draws_random_numbers(node)}
        effects = self.static_writers | draws
        self.before.update(edges_between_effects(self._sources(), checks, effects, self.delivering))

    def _sources(self) -> list[set[int]]:
        """Return for each operator those that it waits for."""
        sources: list[set[int]] = [set() for _ in self.operators]
        for source, index in self.before:
            sources[index].add(source)
        for storage in self.storages.values():
            if storage.producer is not None:
                for user in storage.users - {storage.producer}:
                    sources[user].add(storage.producer)
        return sources

    def finish(self) -> Dataflow:
        if self.has_transfers:
            self.before.update(itertools.pairwise(range(len(self.operators))))
        else:
            self._keep_effects_in_order()
        position = {key: index for index, key in enumerate(self.storages)}
        problem = Problem(
            operators=tuple(Operator(node.name) for node in self.operators),
            arrays=tuple(_array(storage, self.alignment_bytes) for storage in self.storages.values()),
            before=tuple(sorted(self.before)),
            copies=tuple(self.copies),
        )
        produced = tuple(
            tuple(None if key is None else position[key] for key in keys) for keys in self.results
        )
        return Dataflow(
            self.graph_module,
            problem,
            tuple(self.operators),
            produced,
            tuple(storage.size_bytes for storage in self.storages.values()),
            self.alignment_bytes,
            self.device,
            self.gradients,
        )


def arrays_of_results(dataflow: Dataflow, indices: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the arrays in which some of the graph's results lie, if operators make them.

    Args:
        dataflow: the graph.
        indices: of the results.
    """
    names: dict[int, str] = {}
    for node, produced in zip(dataflow.operators, dataflow.produced, strict=True):
        leaves = pytree.tree_leaves(node.meta.get("val"))
        for leaf, array in zip(leaves, produced, strict=False):
            if array is not None:
                names[storage_key(leaf)] = dataflow.problem.arrays[array].name
    results = pytree.tree_leaves(dataflow.graph_module.graph.output_node().args[0])
    chosen = [results[index] for index in indices]
    keys = (
        key for result in chosen if isinstance(result, fx.Node) for key in storages_of(result.meta["val"])
    )
    return tuple(dict.fromkeys(names[key] for key in keys if key in names))


def _tensor_leaves(value: object) -> list[tuple[int, torch.Tensor]]:
    return [(storage_key(leaf), leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _array(storage: _Storage, alignment_bytes: int) -> Array:
    kind = ArrayKind.STATIC if storage.producer is None else ArrayKind.PLANNED
    if kind is ArrayKind.PLANNED and storage.is_output:
        kind = ArrayKind.OUTPUT
    if storage.on_host:
        kind = ArrayKind.HOST
    users = [user for user in storage.users if user != storage.producer]
    size_bytes = rounded(storage.size_bytes, alignment_bytes)
    alignment = alignment_bytes if kind in (ArrayKind.PLANNED, ArrayKind.HOST) else 1
    return Array(storage.name, size_bytes, storage.producer, tuple(sorted(users)), kind, alignment)
