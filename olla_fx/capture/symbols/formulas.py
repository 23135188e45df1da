"""Writes what a graph computes of symbolic sizes as formulas of the sizes of the step's inputs.

A graph that was traced with symbolic sizes has nodes that read sizes off tensors and calculate with them.
Each becomes an attribute of the graph module, ``size_3``, whose value is the hint's, and which is another one
at another size. So the graph is a concrete one, to be read, rewritten and planned like any other, and its
numbers and the bytes of its tensors can be had for any size from one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import LAYOUTS, Layout, Size, size_name
from olla_fx.guards import FromCounts
from olla_fx.torch_compat import pytree

aten = torch.ops.aten
_CHECKS = frozenset({aten._assert_scalar.default, aten.sym_constrain_range_for_size.default})
_TO_THE_END = torch.iinfo(torch.int64).max


class Formulas:
    """The distinct formulas of one graph, as they are found."""

    def __init__(self, sizes: Sequence[torch.SymInt]) -> None:
        """Start without formulas.

        Args:
            sizes: symbolic; those of the inputs first.
        """
        self._symbols = [torch_compat.symbol_of(size) for size in sizes]
        self._known = frozenset(self._symbols)
        self._index: dict[Any, Size] = {}
        self._by_node: dict[Any, Any] = {}

    def of(self, number: Any) -> Any:
        """Return a :class:`~olla_fx.fx_graph.Size` for a number that varies, or the number that it always is.

        Returns:
            None for a number that depends on something else than sizes.
        """
        if not isinstance(number, torch_compat.SYMBOLIC):
            return number
        raw = number.node.expr
        if raw not in self._by_node:
            expression = torch_compat.expression_of(number, self._known)
            if expression is not None and not isinstance(expression, int | float | bool):
                if expression.is_number:
                    expression = type(torch_compat.hint_of(number))(expression)
                else:
                    size = Size(len(self._index), torch_compat.divisor_of(expression))
                    expression = self._index.setdefault(expression, size)
            self._by_node[raw] = expression
        return self._by_node[raw]

    def known(self, number: Any) -> Any:
        """Return what :meth:`of` does.

        Raises:
            CaptureError: for a number that depends on something else than sizes.
        """
        known = self.of(number)
        if known is None and number is not None:
            raise CaptureError("a question about the inputs is asked with a number that is no size")
        return known

    def layout_of(self, tensor: torch.Tensor) -> Layout:
        """Describe a tensor with symbolic sizes.

        Raises:
            CaptureError: if its layout depends on more than sizes.
        """
        numel_bytes: Any = tensor.element_size()
        for extent in tensor.shape:
            numel_bytes = numel_bytes * extent
        layout = Layout(
            tuple(map(self.of, tensor.shape)),
            tuple(map(self.of, tensor.stride())),
            self.of(tensor.storage_offset()),
            self.of(tensor.untyped_storage().nbytes()),
            self.of(numel_bytes),
        )
        if None in (*layout.shape, *layout.stride, layout.offset, layout.storage_bytes):
            raise CaptureError("a tensor's size depends on values of other tensors")
        return layout

    def compiled(self) -> Callable[..., tuple[Any, ...]]:
        """Return a function of the sizes that gives the value of every formula."""
        return torch_compat.function_of(self._symbols, list(self._index))

    def of_counts(self, before: int) -> Mapping[int, FromCounts]:
        """Return the formulas that follow from counts, by their indices.

        Args:
            before: the number of the inputs' sizes, which counts follow.
        """
        results: dict[int, FromCounts] = {}
        for index, expression in enumerate(self._index):
            used = [at for at, symbol in enumerate(self._symbols) if symbol in expression.free_symbols]
            if used[-1] >= before:
                symbols = self._symbols[: used[-1] + 1]
                results[index] = FromCounts(
                    torch_compat.function_of(symbols, [expression]), len(symbols) - before, str(expression)
                )
        return results

    def conditions(self, guards: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return a function of the sizes that gives the truth of every condition."""
        return torch_compat.function_of(self._symbols, guards)


def generalize(graph_module: fx.GraphModule, formulas: Formulas) -> None:
    """Replace what a graph computes of sizes by attributes; note the layouts of its tensors.

    Args:
        graph_module: traced with symbolic sizes; changed.
        formulas: filled.
    """
    graph = graph_module.graph
    sizes: dict[Size, fx.Node] = {}
    hints: dict[Size, Any] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
            continue
        value = node.meta.get("val")
        node.meta[LAYOUTS] = [
            formulas.layout_of(leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in pytree.tree_leaves(value)
        ]
        number = formulas.of(value) if isinstance(value, torch_compat.SYMBOLIC) else None
        if isinstance(number, Size):
            if number not in sizes:
                hints[number] = torch_compat.hint_of(value)
                with graph.inserting_before(first):
                    sizes[number] = _size_node(graph_module, number, hints[number])
            node.replace_all_uses_with(sizes[number])
        elif number is not None:
            _replace_by_constant(node, number)
    for node in reversed(list(graph.nodes)):
        if isinstance(node.meta.get("val"), torch_compat.SYMBOLIC) and not node.users:
            graph.erase_node(node)
    _drop_full_slices(graph)
    graph.eliminate_dead_code()


def _size_node(graph_module: fx.GraphModule, size: Size, hint: Any) -> fx.Node:
    setattr(graph_module, size_name(size), hint)
    node = graph_module.graph.create_node("get_attr", size_name(size))
    node.meta["val"] = hint
    return node


def _replace_by_constant(node: fx.Node, number: Any) -> None:
    def replaced(leaf: fx.Node) -> Any:
        return number if leaf is node else leaf

    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), replaced)


def _drop_full_slices(graph: fx.Graph) -> None:
    """Drop slices that take everything, and their gradients: indexing by numbers leaves them out."""
    for node in list(graph.nodes):
        if node.target is aten.slice.Tensor:
            source = node.args[0]
            dim, start, end, step = _slice_arguments(node.args[1:], (0, None, None, 1))
            extent = source.meta[LAYOUTS][0].shape[dim]
        elif node.target is aten.slice_backward.default:
            source, extents = node.args[0], node.args[1]
            dim, start, end, step = node.args[2:]
            extent = size_of(extents[dim])
            if node.meta[LAYOUTS] != source.meta[LAYOUTS]:
                continue
        else:
            continue
        end = size_of(end)
        if start in (None, 0) and step == 1 and (end in (None, _TO_THE_END) or end == extent):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _slice_arguments(given: Sequence[Any], defaults: Sequence[Any]) -> list[Any]:
    return [*given, *defaults[len(given) :]]


def size_of(argument: Any) -> Any:
    """Return the formula that an argument of a node stands for; other arguments as they are."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        size = Size.of_name(str(argument.target))
        return argument if size is None else size
    return argument
