"""Edits a graph that has fake values: inserts operators with theirs, and says who reads what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.fx_graph import (
    IN_BACKWARD,
    LAYOUTS,
    RECOMPUTED,
    SOURCE,
    Layout,
    is_free,
    layout_of,
    layouts_agree,
    number_argument,
    storages_of,
    written_arguments,
)
from olla_fx.torch_compat import pytree


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the operators that read a node's value, itself or through views of it; the output, too."""
    readers: dict[fx.Node, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op != "output" and is_free(user):
            pending.extend(user.users)
        else:
            readers[user] = None
    return list(readers)


def readers_in_backward(node: fx.Node) -> list[fx.Node]:
    """Return those of :func:`readers_of` that eager's backward runs."""
    return [reader for reader in readers_of(node) if reader.meta.get(IN_BACKWARD)]


def tensor_of(node: Any) -> torch.Tensor | None:
    """Return the fake value of what may be a node, if it is one tensor of numbers known here."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of the elements of a node's tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def writers_of(graph: fx.Graph) -> dict[int | None, set[fx.Node]]:
    """Return the caller's storages that a step writes to, each with the operators that do.

    An operator that reads one must stay in front of these.
    """
    static = {key for node in graph.find_nodes(op="placeholder") for key in storages_of(node.meta.get("val"))}
    writers: dict[int | None, set[fx.Node]] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            for key in storages_of(target.meta.get("val")):
                if key in static:
                    writers.setdefault(key, set()).add(node)
    return writers


def writers_of_sources(node: fx.Node, writers: Mapping[int | None, set[fx.Node]]) -> set[fx.Node]:
    """Return the operators that write to what a node reads."""
    read = (key for source in node.all_input_nodes for key in storages_of(source.meta.get("val")))
    return {writer for key in read for writer in writers.get(key, ())}


def is_returned(node: fx.Node) -> bool:
    """Return True if the caller gets a value, and may change it before backward."""
    return any(reader.op == "output" for reader in readers_of(node))


def holds_exactly(number: object, dtype: torch.dtype) -> bool:
    """Return True if a type has a number: if not, some operators compare with it, others with the nearest."""
    return isinstance(number, int | float) and float(torch.tensor(number, dtype=dtype)) == number


def is_exact_by_elements(tensor: torch.Tensor) -> bool:
    """Return True if arithmetic gives an element the same bits wherever in a tensor it lies.

    In 16 bits the CPU's kernels round products in vectors otherwise than in what is left of a row.
    """
    return tensor.dtype in (torch.float32, torch.float64) or (
        tensor.device.type != "cpu" and tensor.is_floating_point()
    )


def insert(
    before: fx.Node,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    layout: Layout | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """Insert an operator with its fake value.

    Args:
        before: what it is to stand in front of.
        target: the operator.
        args: positional arguments, nodes and values.
        kwargs: arguments by name.
        layout: of its one result, where sizes vary.
        like: runs in the same phase; by default ``before`` does.

    Returns:
        The new node.
    """
    graph, phase = before.graph, like or before
    with graph.inserting_before(before):
        node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    values, named = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    mode = torch_compat.fake_mode_of(pytree.tree_leaves((values, named)))
    with mode, torch.no_grad():
        node.meta["val"] = target(*values, **named)
    for key in (IN_BACKWARD, RECOMPUTED, SOURCE):
        if key in phase.meta:
            node.meta[key] = phase.meta[key]
    if layout is not None:
        node.meta[LAYOUTS] = [layout]
    return node


def replace_by(old: fx.Node, new: fx.Node) -> bool:
    """Let readers of a node read another one if its value lies in memory alike; else erase the new one.

    How a tensor lies in memory decides what kernels do with it, and so the bits.

    Args:
        old: erased if True is returned.
        new: stands before all readers of ``old``.

    Returns:
        True if the node was replaced.
    """
    if not same_layout(old, new):
        if not new.users:
            new.graph.erase_node(new)
        return False
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
    return True


def same_layout(one: fx.Node, other: fx.Node) -> bool:
    """Return True if two nodes hold a tensor each of the same type, shape and strides."""
    left, right = tensor_of(one), tensor_of(other)
    if left is None or right is None:
        return False
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.stride() == right.stride())


def shape_arguments(node: fx.Node) -> tuple[list[Any], list[Any]]:
    """Return shape and strides of a node's tensor as arguments of another node."""
    layout, value = layout_of(node), cast(torch.Tensor, tensor_of(node))
    if layout is None:
        return list(value.shape), list(value.stride())
    return (
        [_number(node.graph, *pair) for pair in zip(layout.shape, value.shape, strict=True)],
        [_number(node.graph, *pair) for pair in zip(layout.stride, value.stride(), strict=True)],
    )


def has_own_layout(node: fx.Node, source: Any) -> bool:
    """Return True if a node's tensor lies in memory as that of one of its arguments does, at all sizes."""
    return same_layout(node, source) and layouts_agree(node, source)


def _number(graph: fx.Graph, number: Any, value: int) -> Any:
    """Return what stands for a number as an argument; it is ``value`` here."""
    argument = number_argument(graph, number)
    if isinstance(argument, fx.Node):
        argument.meta.setdefault("val", value)
    return argument


def sizes_vary(graph: fx.Graph) -> bool:
    """Return True if a graph stands for a step at all sizes of its inputs."""
    return any(LAYOUTS in node.meta for node in graph.nodes)
