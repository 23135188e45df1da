"""Puts repetitions of operators into a step's graph, so that arrays can be dropped until a later phase.

Which operators run again, and who reads what from which repetition, is given. It was planned on the graph
after all passes in which nothing is written over what an earlier phase made (``keep_phases``), so that an
array that is made again has the in-place operators of its own phase behind its producer, and these alone.

The graph keeps its own sequence, on which the meaning of writes rests. A repetition stands in front of its
first reader, and of all that overwrite what it reads. All that the operator itself has read is there, since
the reader stands behind the operator.

Afterwards operators get back the right to write over what an earlier phase made, where nobody needs it any
longer: over repetitions, or over what is now needed by that phase alone.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.draws import random_state
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import (
    IN_BACKWARD,
    LAYOUTS,
    RECOMPUTED,
    REPEATED,
    SOURCE,
    Layout,
    draws_random_numbers,
    forward_backward_boundary,
    is_free,
    storages_of,
    written_arguments,
)
from olla_fx.normalization import clamp_while_normalizing
from olla_fx.passes.cleanup import has_effect
from olla_fx.passes.propagate import follow_storages, views_in
from olla_fx.passes.reinplace import reinplace
from olla_fx.passes.repeatable import (
    DRAWN_AGAIN,
    RUNNING_MEAN,
    Repeatable,
    has_statistics,
)
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.torch_compat import pytree, storage_key

aten = torch.ops.aten

_Run: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class OperatorRun:
    """One run of an operator in a step with repetitions.

    Attributes:
        operator: its name.
        copy: 0 for the operator itself, 1 for its first repetition, and so on.
        sources: which repetition of an operator it reads the results of, by the operator's name; of all
            others those of the operator itself. Of an array that several operators have written, all.
    """

    operator: str
    copy: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RepeatedGraph:
    """A step's graph with repetitions.

    Attributes:
        graph_module: the graph.
        order: the operators' names in the sequence that was given, to begin from when it is ordered.
        runs: for each run that was given, the name of its operator; None if nobody reads its results, or
            another operator does its work, too.
    """

    graph_module: fx.GraphModule
    order: tuple[str, ...]
    runs: tuple[str | None, ...]


def repeat_operators(
    graph_module: fx.GraphModule,
    runs: Sequence[OperatorRun],
    device: torch.device,
    probe: Probe | None = None,
) -> RepeatedGraph:
    """Put repetitions into a copy of a graph; see the module docstring.

    Args:
        graph_module: after all passes, with ``keep_phases``; not changed.
        runs: of its operators, in sequence: each once as itself, and repetitions before their readers.
        device: the one that is planned.
        probe: says whether kernels give equal bits; None if none may be used that need this.

    Raises:
        CaptureError: if the graph does not allow a repetition.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    views = views_in(graph)
    inserter = _Inserter(graph, runs, device, probe)
    with torch_compat.fake_mode_of(node.meta.get("val") for node in graph.nodes), torch.no_grad():
        inserter.insert()
    clamp_while_normalizing(graph)
    graph.eliminate_dead_code(has_effect)
    views |= inserter.views
    follow_storages(graph_module, graph, views)
    reinplace(graph)
    follow_storages(graph_module, graph, views)
    return RepeatedGraph(
        torch_compat.lazy_graph_module(graph_module, graph),
        tuple(_names_in_order(inserter.sequence)),
        tuple(map(inserter.name_of, runs)),
    )


def _names_in_order(sequence: Sequence[fx.Node]) -> Iterator[str]:
    """Yield the operators' names, with those that passes have inserted in front of who reads them."""
    named = set(sequence)
    for node in sequence:
        if torch_compat.is_erased(node):
            continue
        for source in node.all_input_nodes:
            if source not in named and not is_free(source):
                named.add(source)
                yield source.name
        yield node.name


class _Inserter:
    """Inserts repetitions.

    Attributes:
        views: nodes that were inserted and are views.
        sequence: the operators in the sequence of the runs, with those that were inserted.
    """

    def __init__(
        self, graph: fx.Graph, runs: Sequence[OperatorRun], device: torch.device, probe: Probe | None
    ) -> None:
        self.views: set[fx.Node] = set()
        self.sequence: list[fx.Node] = []
        self._graph = graph
        self._runs = runs
        self._repeatable = Repeatable(graph, device, probe)
        self._nodes = {node.name: node for node in graph.nodes}
        self._place = list(graph.nodes)
        self._made: dict[_Run, list[fx.Node]] = {}
        self._views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._device = device
        self._states: dict[fx.Node, fx.Node] = {}

    def insert(self) -> None:
        """Insert all repetitions, and let all readers read what they are told to."""
        position = self._positions()
        numbers = {(run.operator, run.copy): number for number, run in enumerate(self._runs)}
        read = [run for run in self._runs if (run.operator, run.copy) in position]
        concerned = [run for run in read if run.copy or any(run.sources.values())]

        def place(run: OperatorRun) -> tuple[int, bool, int]:
            key = run.operator, run.copy
            return position[key], run.copy == 0, numbers[key]

        for run in sorted(concerned, key=place):
            if run.copy == 0:
                self._read_anew(run)
            else:
                self._repeat(run, self._place[position[run.operator, run.copy]])
        for run in read:
            node = self._nodes[run.operator]
            if node.target is forward_backward_boundary:
                self.sequence.extend(self._copies.values())
            if run.copy:
                self.sequence.extend(self._made[run.operator, run.copy])
            else:
                self.sequence.extend([self._states[node], node] if node in self._states else [node])

    def name_of(self, run: OperatorRun) -> str | None:
        """Return the name of a run's operator; None if there is none."""
        made = self._made.get((run.operator, run.copy)) if run.copy else [self._nodes[run.operator]]
        return None if not made or torch_compat.is_erased(made[-1]) else made[-1].name

    def _positions(self) -> dict[_Run, int]:
        """Return for each run the node in front of which it is to stand, by that one's position.

        A repetition that nobody reads has none.
        """
        own = self._repeatable.position
        position: dict[_Run, int] = {}
        needed: dict[_Run, int] = {}
        for run in reversed(self._runs):
            key, node = (run.operator, run.copy), self._nodes[run.operator]
            if run.copy and key not in needed:
                continue
            position[key] = own[node]
            if run.copy:
                later = self._repeatable.later_writers(node)
                phase = self._repeatable.phase(node)
                are_later = all(self._repeatable.phase(writer) > phase for writer in later)
                if not self._repeatable.may_run_again(node) or not are_later:
                    raise CaptureError(f"{node.name} cannot run again with the same result")
                position[key] = min([needed[key], *(own[writer] for writer in later)])
            for source in run.sources.items():
                if source[1]:
                    needed[source] = min(position[key], needed.get(source, position[key]))
        return position

    def _read_anew(self, run: OperatorRun) -> None:
        """Let an operator read repetitions."""
        node = self._nodes[run.operator]
        for source in node.all_input_nodes:
            image = self._image(source, run, node)
            if image is not source:
                node.replace_input_with(source, image)

    def _repeat(self, run: OperatorRun, before: fx.Node) -> None:
        """Insert a repetition, and what it needs."""
        node = self._nodes[run.operator]
        scratch: dict[fx.Node, Any] = {}
        target, args, kwargs = node.target, list(node.args), dict(node.kwargs)
        from_statistics = self._repeatable.from_statistics(node)
        if from_statistics is not None:
            target, args = from_statistics.target, list(from_statistics.args)
        elif draws_random_numbers(node):
            target, args = DRAWN_AGAIN[node.target], [self._state_before(node), self._device, *args]
        elif has_statistics(node):
            if target is aten._native_batch_norm_legit.default:
                target = aten._native_batch_norm_legit.no_stats
                del args[RUNNING_MEAN : RUNNING_MEAN + 2]
            else:
                scratch.update({args[index]: None for index in (RUNNING_MEAN, RUNNING_MEAN + 1)})
        if from_statistics is None:
            scratch.update({argument: None for argument in written_arguments(node) if _is_unread(argument)})
        for argument in scratch:
            scratch[argument] = self._scratch_like(argument, before)
        args, kwargs = fx.map_arg(
            (args, kwargs), lambda source: scratch.get(source) or self._image(source, run, before)
        )
        with self._graph.inserting_before(before):
            again = self._graph.create_node(
                "call_function", target, tuple(args), kwargs, f"{node.name}_repeated"
            )
        again.meta = _meta_of_repetition(node)
        if self._repeatable.makes_first_alone(node):
            again.meta["val"] = node.meta["val"][0]
            if LAYOUTS in node.meta:
                again.meta[LAYOUTS] = node.meta[LAYOUTS][:1]
        read = {key for source in node.all_input_nodes for key in storages_of(source.meta.get("val"))}
        if read.isdisjoint(set(storages_of(again.meta["val"])) - {None}):
            again.meta["val"] = _fresh(again.meta["val"])
        self._made[run.operator, run.copy] = [*scratch.values(), again]

    def _image(self, source: fx.Node, run: OperatorRun, before: fx.Node) -> fx.Node:
        """Return what a run reads in the place of a node; views are inserted in front of a node."""
        if source.op == "placeholder":
            return (
                self._copy_of(source) if run.copy and self._repeatable.is_read_from_copy(source) else source
            )
        if not is_free(source):
            return self._result(source, run)
        if source.target is operator.getitem:
            maker = source.all_input_nodes[0]
            if self._repeatable.makes_first_alone(maker):
                return source if source.args[1] else self._result(maker, run, source)
        images = {node: self._image(node, run, before) for node in source.all_input_nodes}
        if all(node is image for node, image in images.items()):
            return source
        key = source, tuple(images.values())
        if key not in self._views:
            with self._graph.inserting_before(before):
                view = self._graph.node_copy(source, images.__getitem__)
            view.meta = _meta_of_repetition(source)
            self._views[key] = view
            self.views.add(view)
        return self._views[key]

    def _result(self, node: fx.Node, run: OperatorRun, otherwise: fx.Node | None = None) -> fx.Node:
        number = run.sources.get(node.name, 0)
        return self._made[node.name, number][-1] if number else otherwise or node

    def _copy_of(self, placeholder: fx.Node) -> fx.Node:
        """Return a copy of a tensor of the caller's that forward makes."""
        if placeholder not in self._copies:
            with self._graph.inserting_before(self._repeatable.backward):
                copied = self._graph.call_function(aten.clone.default, (placeholder,))
            copied.meta = {**placeholder.meta, "val": _fresh(placeholder.meta["val"])}
            self._copies[placeholder] = copied
        return self._copies[placeholder]

    def _state_before(self, draw: fx.Node) -> fx.Node:
        """Return the state of the generator before an operator first draws."""
        if draw not in self._states:
            with self._graph.inserting_before(draw):
                state = self._graph.call_function(random_state, (self._device,))
            state.meta = {key: value for key, value in draw.meta.items() if key in (IN_BACKWARD, SOURCE)}
            state.meta["val"] = random_state(self._device)
            state.meta[LAYOUTS] = [_layout_at_all_sizes(state.meta["val"])]
            self._states[draw] = state
        return self._states[draw]

    def _scratch_like(self, written: fx.Node, before: fx.Node) -> fx.Node:
        """Insert a tensor for what a repetition writes and nobody reads, such as a running statistic."""
        value = written.meta["val"]
        with self._graph.inserting_before(before):
            named = {"dtype": value.dtype, "device": value.device}
            scratch = self._graph.call_function(aten.empty.memory_format, (list(value.shape),), named)
        scratch.meta = {REPEATED: True, IN_BACKWARD: True, "val": _fresh(value)}
        scratch.meta[LAYOUTS] = [_layout_at_all_sizes(value)]
        return scratch


def _layout_at_all_sizes(value: torch.Tensor) -> Layout:
    size_bytes = value.numel() * value.element_size()
    return Layout(tuple(value.shape), tuple(value.stride()), 0, size_bytes, size_bytes)


def _is_unread(node: fx.Node) -> bool:
    """Return True for a tensor without elements, which stands for results that an operator does not make."""
    return node.target is aten.empty.memory_format and node.meta["val"].numel() == 0


def _meta_of_repetition(node: fx.Node) -> dict[str, Any]:
    meta = copy.copy(node.meta)
    meta.pop(RECOMPUTED, None)
    meta[IN_BACKWARD] = meta[REPEATED] = True
    return meta


def _fresh(value: Any) -> Any:
    """Return fake tensors that lie in storages of their own as some others do in theirs."""
    storages: dict[int, torch.Tensor] = {}

    def fresh(leaf: torch.Tensor) -> torch.Tensor:
        key = storage_key(leaf)
        if key not in storages:
            count = -(-leaf.untyped_storage().nbytes() // leaf.element_size())
            storages[key] = torch.empty(count, dtype=leaf.dtype, device=leaf.device)
        base = storages[key] if storages[key].dtype == leaf.dtype else storages[key].view(leaf.dtype)
        return base.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())

    return pytree.tree_map_only(torch.Tensor, fresh, value)
