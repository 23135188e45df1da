"""Computes a weight's gradient and its update in blocks of rows.

The gradient of a linear layer is one matrix product, as large as the weight, and often the largest array of a
step at small batches. Where nothing reads it but an update that treats all elements alike (SGD with momentum
and decay, Adam, AdamW), a block of its rows is computed, used and forgotten before the next one is. So are
the optimizer's temporaries. The gradient of an embedding is cut in the same way: each block ignores the
tokens of the others.

In 32 and 64 bits the operators of an update are rounded as IEEE 754 says, element by element, wherever an
element lies. The product is not: kernels are chosen by shape, so equal bits are probed
(:mod:`olla_fx.passes.rewrites.probes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import fx

from olla_fx import operators
from olla_fx.fx_graph import written_arguments
from olla_fx.passes.rewrites.edit import (
    bytes_of,
    insert,
    is_exact_by_elements,
    sizes_vary,
    tensor_of,
    writers_of,
    writers_of_sources,
)
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import Change
from olla_fx.torch_compat import OpOverload

aten = torch.ops.aten
_EXACT = frozenset(
    getattr(getattr(aten, name + suffix), overload)
    for name, overloads in {
        "add": ("Tensor",),
        "mul": ("Tensor",),
        "div": ("Tensor",),
        "maximum": ("default", "out"),
        "neg": ("default",),
        "sqrt": ("default",),
        "lerp": ("Scalar",),
        "addcmul": ("default",),
        "addcdiv": ("default",),
    }.items()
    for suffix in ("", "_")
    for overload in overloads
    if hasattr(aten, name + suffix) and hasattr(getattr(aten, name + suffix), overload)
)
"""Operators of updates whose results do not depend on where in a tensor an element lies."""

BLOCKS_IN_PEAK = 16
"""So many blocks take as much as the step needs where there is no gradient."""

LEAST_BLOCK_BYTES = 2**20
MOST_BLOCKS = 32
_ROWS = 16
"""Blocks are multiples of so many rows, so that kernels see whole tiles."""


@dataclass(frozen=True)
class _Update:
    """The use of a gradient.

    Attributes:
        gradient: the operator that computes it.
        aliases: nodes with its value.
        operators: what calculates with it, in the graph's sequence; element by element.
    """

    gradient: fx.Node
    aliases: frozenset[fx.Node]
    operators: tuple[fx.Node, ...]


def gradients_of_updates(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return the operators whose results could be computed in blocks, each with itself and its update's.

    Args:
        graph: with fake values, after all passes; not changed. One whose sizes vary has none.
    """
    if sizes_vary(graph):
        return {}
    position = {node: index for index, node in enumerate(graph.nodes)}
    gradients = [node for kind in _CUTS for node in graph.find_nodes(op="call_function", target=kind)]
    large = [node for node in gradients if bytes_of(node) >= 2 * LEAST_BLOCK_BYTES]
    writers = writers_of(graph)
    updates = [_update_of(node, position, writers) for node in large]
    return {
        update.gradient.name: (update.gradient.name, *(node.name for node in update.operators))
        for update in updates
        if update is not None
    }


def update_in_blocks(graph: fx.Graph, cuts: Mapping[str, int], probe: Probe) -> list[Change]:
    """Cut large gradients and their updates; see the module docstring.

    Args:
        graph: with fake values, its updates in place; changed.
        cuts: the gradients to cut, by name, each with the bytes of a block.
        probe: says whether kernels give equal bits.

    Returns:
        What was changed.
    """
    changes = []
    position = {node: index for index, node in enumerate(graph.nodes)}
    writers = writers_of(graph)
    for kind, cut in _CUTS.items():
        for gradient in list(graph.find_nodes(op="call_function", target=kind)):
            update = _update_of(gradient, position, writers) if gradient.name in cuts else None
            rows = _rows_of_blocks(gradient, cuts.get(gradient.name, 0))
            if update is None or not _is_exact_in_blocks(gradient, rows, probe):
                continue
            size_bytes = bytes_of(gradient)
            saved_bytes = size_bytes - size_bytes * rows // cast(torch.Tensor, tensor_of(gradient)).shape[0]
            changes.append(Change("blocked_updates", gradient.name, saved_bytes))
            _cut(update, rows, cut)
    return changes


def _is_exact_in_blocks(gradient: fx.Node, rows: int, probe: Probe) -> bool:
    if gradient.target is aten.embedding_dense_backward.default:
        scales_by_frequency = gradient.args[4]
        return not scales_by_frequency
    left, right = (cast(torch.Tensor, tensor_of(argument)) for argument in gradient.args)
    return probe.equal_in_blocks(left, right, rows)


def _rows_of_blocks(gradient: fx.Node, block_bytes: int) -> int:
    """Return the number of rows of a block."""
    all_rows = cast(torch.Tensor, tensor_of(gradient)).shape[0]
    blocks = min(MOST_BLOCKS, max(2, bytes_of(gradient) // max(block_bytes, LEAST_BLOCK_BYTES)))
    rows = -(-all_rows // blocks)
    return -(-rows // _ROWS) * _ROWS


def _update_of(
    gradient: fx.Node, position: Mapping[fx.Node, int], writers: Mapping[int | None, set[fx.Node]]
) -> _Update | None:
    """Return the use of a gradient, if all of it is an update that takes one element at a time.

    It is moved to its last operator, so it must read nothing that others write to.
    """
    aliases: set[fx.Node] = {gradient}
    operators: set[fx.Node] = set()
    pending = [gradient]
    while pending:
        for user in list(pending.pop().users):
            if user in operators or user in aliases:
                continue
            if user.target is aten.t.default:
                again = list(user.users)
                if any(view.target is not aten.t.default for view in again):
                    return None
                aliases.update((user, *again))
                pending.extend(again)
            elif _is_exact(user, gradient):
                more = _with_sources(user, gradient, aliases, operators)
                if more is None:
                    return None
                operators |= more
                pending.extend(more)
            else:
                return None
    writes = any(target.op == "placeholder" for node in operators for target in written_arguments(node))
    others = {writer for node in operators for writer in writers_of_sources(node, writers)} - operators
    if not writes or others or writers_of_sources(gradient, writers) or not operators <= position.keys():
        return None
    return _Update(gradient, frozenset(aliases), tuple(sorted(operators, key=position.__getitem__)))


def _is_exact(node: fx.Node, gradient: fx.Node) -> bool:
    return node.target in _EXACT and _lies_like(node, gradient)


def _lies_like(node: fx.Node, gradient: fx.Node) -> bool:
    """Return True if a node's tensor has a gradient's shape, in rows of full length."""
    value, wanted = tensor_of(node), cast(torch.Tensor, tensor_of(gradient))
    return (
        value is not None
        and value.shape == wanted.shape
        and value.is_contiguous()
        and is_exact_by_elements(value)
        and value.device == wanted.device
    )


def _with_sources(
    node: fx.Node, gradient: fx.Node, aliases: set[fx.Node], known: set[fx.Node]
) -> set[fx.Node] | None:
    """Return an operator with those that only it waits for; None if one of them is of another kind."""
    operators: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in operators or current in known or current in aliases:
            continue
        if current.op == "placeholder" and _lies_like(current, gradient):
            continue
        if not _is_exact(current, gradient):
            return None
        operators.add(current)
        pending.extend(source for source in current.all_input_nodes if _has_elements(source))
    return operators


def _has_elements(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() > 0


def _cut(update: _Update, rows: int, cut: Cut) -> None:
    """Replace an update by blocks of it."""
    last = update.operators[-1]
    total = cast(torch.Tensor, tensor_of(update.gradient)).shape[0]
    for start in range(0, total, rows):
        end = min(start + rows, total)
        block = cut(update.gradient, last, start, end)
        _update_block(update, last, block, start, end)
    for node in reversed(update.operators):
        node.graph.erase_node(node)
    update.gradient.graph.eliminate_dead_code(lambda node: node not in update.aliases)


def _update_block(update: _Update, before: fx.Node, block: fx.Node, start: int, end: int) -> None:
    new: dict[fx.Node, fx.Node] = dict.fromkeys(update.aliases, block)

    def of_block(node: fx.Node) -> fx.Node:
        if node not in new and node.op == "placeholder" and _has_elements(node):
            new[node] = insert(before, aten.slice.Tensor, (node, 0, start, end), like=node)
        return new.get(node, node)

    for node in update.operators:
        args, kwargs = fx.map_arg((node.args, node.kwargs), of_block)
        new[node] = insert(before, node.target, args, kwargs, like=node)


def _rows_of_product(product: fx.Node, before: fx.Node, start: int, end: int) -> fx.Node:
    rows = insert(before, aten.slice.Tensor, (product.args[0], 0, start, end), like=product)
    return insert(before, aten.mm.default, (rows, product.args[1]), like=product)


def _rows_of_embedding(gradient: fx.Node, before: fx.Node, start: int, end: int) -> fx.Node:
    above, tokens, _, padding, _ = gradient.args
    arguments = (above, tokens, start, end, padding)
    return insert(before, operators.embedding_rows_backward, arguments, like=gradient)


Cut: TypeAlias = Callable[[fx.Node, fx.Node, int, int], fx.Node]
"""Inserts the operators that compute rows of a gradient, from the first row to before the last one."""

_CUTS: Mapping[OpOverload, Cut] = {
    aten.mm.default: _rows_of_product,
    aten.embedding_dense_backward.default: _rows_of_embedding,
}
"""Operators that compute gradients, each with what computes some rows of it."""
