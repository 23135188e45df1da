"""Lets arrays of a graph wait on the host: puts in what copies them out and in, and waits for it.

When each array goes and comes back is given, for a sequence of the graph's operators. The graph then stands
in that sequence, which is its meaning from here on: the dataflow lets each operator wait for the one before,
so that nothing moves a wait towards the copy that it waits for, or makes an array live longer. This is the
last pass, since others do not know that.

What waits is a storage, with all views of it. It comes back as a new one: who reads the array from then on
reads views of that, in the layouts of the fake values; views that operators were given of views are made
again. What writes to the array afterwards writes to the new one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.errors import SwapError
from olla_fx.fx_graph import LAYOUTS, is_free, storages_of
from olla_fx.link import offload, offload_wait, reload, reload_wait
from olla_fx.passes.propagate import follow_storages, views_in
from olla_fx.passes.sequence import put_in_sequence
from olla_fx.torch_compat import pytree, storage_key

aten = torch.ops.aten


@dataclass(frozen=True)
class HostStay:
    """A storage's stay on the host, in timesteps of the sequence.

    The fields are those of :class:`olla_solvers.swapping.transfers.Transfer`.

    Attributes:
        storage: key of the storage that waits.
        out_after: the last timestep that accesses it before.
        gone_before: in front of this timestep the copy out is waited for.
        back_from: in front of this timestep copying in begins.
        back_before: in front of this timestep the copy in is waited for; the first that accesses it again.
    """

    storage: int
    out_after: int
    gone_before: int
    back_from: int
    back_before: int


def why_not_swapped(graph: fx.Graph) -> dict[int, str]:
    """Return the storages of a graph that cannot wait on the host, each with the reason.

    Args:
        graph: after all other passes.
    """
    reasons: dict[int, str] = {}
    for node in graph.nodes:
        for tensor in pytree.tree_leaves(node.meta.get("val")):
            if not isinstance(tensor, torch.Tensor):
                continue
            reason = None
            if LAYOUTS in node.meta:
                reason = "its size varies"
            elif tensor.is_conj() or tensor.is_neg():
                reason = "a view of it is conjugated or negated lazily"
            elif tensor.untyped_storage().nbytes() % tensor.itemsize:
                reason = "its bytes are no whole number of elements"
            elif node.op in ("placeholder", "get_attr"):
                reason = "it is the caller's"
            if reason is not None:
                reasons[storage_key(tensor)] = reason
    for node in graph.output_node().all_input_nodes:
        for storage in storages_of(node.meta.get("val")):
            if storage is not None:
                reasons[storage] = "it is handed to the caller"
    return reasons


def put_in_transfers(
    graph_module: fx.GraphModule, operators: Sequence[str], stays: Sequence[HostStay]
) -> fx.GraphModule:
    """Put transfers into a copy of a graph; see the module docstring.

    Args:
        graph_module: after all other passes; not changed.
        operators: names of all operators, in a sequence that the graph allows.
        stays: of what waits on the host.

    Returns:
        The copy. Each transfer's begins and waits have its position among the stays as their number.

    Raises:
        SwapError: if an array is accessed while it is away.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    views = views_in(graph)
    nodes = {node.name: node for node in graph.nodes}
    inserter = _Inserter(graph, [nodes[name] for name in operators])
    with torch_compat.fake_mode_of(node.meta.get("val") for node in graph.nodes), torch.no_grad():
        inserter.insert(stays)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and is_free(node):
            graph.erase_node(node)
    put_in_sequence(graph, inserter.sequence())
    follow_storages(graph_module, graph, views | inserter.views)
    return torch_compat.lazy_graph_module(graph_module, graph)


@dataclass
class _Boundary:
    """What happens in front of a timestep, in this sequence; of each kind in that of the stays."""

    begins_out: list[fx.Node] = field(default_factory=list)
    waits_out: list[fx.Node] = field(default_factory=list)
    begins_in: list[fx.Node] = field(default_factory=list)
    waits_in: list[fx.Node] = field(default_factory=list)


class _Inserter:
    """Inserts begins and waits.

    Attributes:
        views: nodes that were inserted and are views.
    """

    def __init__(self, graph: fx.Graph, operators: Sequence[fx.Node]) -> None:
        self.views: set[fx.Node] = set()
        self._graph = graph
        self._operators = operators
        self._timestep = {node: timestep for timestep, node in enumerate(operators)}
        self._copies: dict[int, tuple[HostStay, fx.Node, fx.Node, fx.Node, fx.Node]] = {}

    def sequence(self) -> list[fx.Node]:
        """Return all operators with the inserted ones, in sequence."""
        boundaries = [_Boundary() for _ in range(len(self._operators) + 1)]
        for number in sorted(self._copies):
            stay, host, gone, back, there = self._copies[number]
            boundaries[stay.out_after + 1].begins_out.append(host)
            boundaries[stay.gone_before].waits_out.append(gone)
            boundaries[stay.back_from].begins_in.append(back)
            boundaries[stay.back_before].waits_in.append(there)
        sequence: list[fx.Node] = []
        for boundary, node in zip(boundaries, self._operators, strict=False):
            sequence += boundary.begins_out + boundary.waits_out + boundary.begins_in + boundary.waits_in
            sequence.append(node)
        return sequence

    def insert(self, stays: Sequence[HostStay]) -> None:
        """Insert all transfers, and let all readers read what has come back."""
        by_storage: dict[int, list[tuple[int, HostStay]]] = {}
        for number, stay in enumerate(stays):
            by_storage.setdefault(stay.storage, []).append((number, stay))
        for storage, numbered in by_storage.items():
            numbered.sort(key=lambda pair: pair[1].out_after)
            self._insert_stays(storage, numbered)

    def _insert_stays(self, storage: int, numbered: Sequence[tuple[int, HostStay]]) -> None:
        """Insert the transfers of one storage, and let who reads it later read the new ones."""
        reading = self._readers(storage)
        producer = next(node for node in self._timestep if _tensors_in(node, storage))
        self._check(producer, reading, [stay for _, stay in numbered])
        held = self._first_tensor(producer, storage)
        arrays = [held]
        for number, stay in numbered:
            held = self._insert_stay(number, stay, held, producer)
            arrays.append(held)
        images = _Images(self, storage, arrays, [stay.back_before for _, stay in numbered])
        for node in reading:
            for source in node.all_input_nodes:
                image = images.of(source, self._timestep[node])
                if image is not source:
                    node.replace_input_with(source, image)

    def _readers(self, storage: int) -> list[fx.Node]:
        return [
            node
            for node in self._operators
            if any(storage in storages_of(source.meta.get("val")) for source in node.all_input_nodes)
        ]

    def _check(self, producer: fx.Node, readers: Sequence[fx.Node], stays: Sequence[HostStay]) -> None:
        """Refuse transfers during which a storage is accessed, or that overlap.

        Raises:
            SwapError: naming the operator.
        """
        made_at = self._timestep[producer]
        for stay, later in zip(stays, [*stays[1:], None], strict=True):
            for node in readers:
                if stay.out_after < self._timestep[node] < stay.back_before:
                    raise SwapError(f"{node.name} uses an array of {producer.name} while it is on the host")
            if stay.out_after < made_at:
                raise SwapError(f"{producer.name} has not made yet what is to wait on the host")
            if later is not None and later.out_after < stay.back_before:
                raise SwapError(f"an array of {producer.name} goes to the host before it is back")

    def _first_tensor(self, producer: fx.Node, storage: int) -> fx.Node:
        """Return the node of an operator's result that lies in a storage."""
        if isinstance(producer.meta["val"], torch.Tensor):
            return producer
        for user in producer.users:
            if user.target is operator.getitem and _tensors_in(user, storage):
                return user
        index = storages_of(producer.meta["val"]).index(storage)
        with self._graph.inserting_after(producer):
            part = self._graph.call_function(operator.getitem, (producer, index))
        part.meta["val"] = producer.meta["val"][index]
        return part

    def _insert_stay(self, number: int, stay: HostStay, array: fx.Node, producer: fx.Node) -> fx.Node:
        """Insert one transfer; return the array that has come back."""
        tensor: torch.Tensor = array.meta["val"]
        named = f"{producer.name}_{number}"
        host = self._call(f"offload_{named}", offload, array, number)
        gone = self._call(f"offload_wait_{named}", offload_wait, host, array, number)
        back = self._call(f"reload_{named}", reload, host, number, tensor.dtype, tensor.device)
        there = self._call(f"reload_wait_{named}", reload_wait, back, host, number)
        self._copies[number] = stay, host, gone, back, there
        return back

    def _call(self, name: str, target: Callable[..., Any], *arguments: Any) -> fx.Node:
        with self._graph.inserting_before(self._graph.output_node()):
            node = self._graph.create_node("call_function", target, arguments, name=name)
        node.meta["val"] = target(*fx.map_arg(arguments, lambda source: source.meta["val"]))
        return node

    def view(self, target: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Insert a view."""
        node = self._call("swapped_view", target, *arguments)
        self.views.add(node)
        return node

    def view_again(self, node: fx.Node, images: dict[fx.Node, fx.Node]) -> fx.Node:
        """Insert a view as another one, of other nodes."""
        with self._graph.inserting_before(self._graph.output_node()):
            view = self._graph.node_copy(node, images.__getitem__)
        self.views.add(view)
        return view

    def timestep_of(self, node: fx.Node) -> int:
        """Return when an operator runs."""
        return self._timestep[node]


class _Images:
    """What stands for the nodes of a storage once it has come back, perhaps several times."""

    def __init__(
        self, inserter: _Inserter, storage: int, arrays: Sequence[fx.Node], back_before: Sequence[int]
    ) -> None:
        self._inserter = inserter
        self._storage = storage
        self._arrays = arrays
        self._back_before = back_before
        self._known: dict[tuple[fx.Node, int], fx.Node] = {}

    def of(self, node: fx.Node, timestep: int) -> fx.Node:
        """Return what an operator of a timestep reads in the place of a node."""
        return self._image(node, self._returns(timestep))

    def _returns(self, timestep: int) -> int:
        """Return how often the array has come back at a timestep."""
        return sum(timestep >= back_before for back_before in self._back_before)

    def _image(self, node: fx.Node, returns: int) -> fx.Node:
        if not _tensors_in(node, self._storage):
            return node
        key = node, returns
        if key not in self._known:
            self._known[key] = self._new_image(node, returns)
        return self._known[key]

    def _new_image(self, node: fx.Node, returns: int) -> fx.Node:
        is_part = node.target is operator.getitem and not is_free(node.all_input_nodes[0])
        if is_free(node) and not is_part:
            images = {source: self._image(source, returns) for source in node.all_input_nodes}
            is_same = all(source is image for source, image in images.items())
            return node if is_same else self._inserter.view_again(node, images)
        maker = node.all_input_nodes[0] if is_part else node
        if self._returns(self._inserter.timestep_of(maker)) == returns:
            return node
        array, tensor = self._arrays[returns], node.meta["val"]
        if array.meta["val"].dtype != tensor.dtype:
            array = self._inserter.view(aten.view.dtype, array, tensor.dtype)
        return self._inserter.view(
            aten.as_strided.default, array, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        )


def _tensors_in(node: fx.Node, storage: int) -> list[torch.Tensor]:
    """Return the tensors of a node's value that lie in a storage."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and storage_key(leaf) == storage]
