"""Turns weight updates into operators that write straight into their static arrays.

A captured update reads ``copy_(p, addcdiv(mul(p, a), m, d))``: the new value is a parameter-sized
temporary that is copied over the old one. If the value is a chain of operators that starts at ``p``
itself and each has an in-place form (or, being element-wise, an ``out=`` form), the chain becomes
``addcdiv_(mul_(p, a), m, d)`` and the copy disappears. The in-place forms give the same bits; complex
numbers, for which ``addcmul`` does not, are left alone.

A link may be made in place only if nobody reads the old value afterwards: every other reader must
stand before it in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.fx_graph import layouts_agree, storages_of
from olla_fx.passes.in_place_forms import in_place_form, out_form, write_over
from olla_fx.torch_compat import pytree, storage_key

aten = torch.ops.aten
_STATISTICS = 3, 4
"""Positions of the running mean and variance among the arguments of batch norms."""

_BATCH_NORMS: dict[object, tuple[torch_compat.OpOverload, tuple[int, int]]] = {
    aten._native_batch_norm_legit_functional.default: (aten._native_batch_norm_legit.default, (3, 4)),
    aten._batch_norm_with_update_functional.default: (aten._batch_norm_with_update.default, (4, 5)),
}
"""Functional batch norms: the form that writes the statistics, and their positions among the results."""


def reinplace_updates(graph: fx.Graph) -> tuple[str, ...]:
    """Turn every update chain that allows it into in-place operators; see the module docstring.

    Args:
        graph: propagated with fake tensors; changed. Its metadata is out of date afterwards.

    Returns:
        The names of the static arrays that are now updated in place.
    """
    copies = _trailing_copies(graph)
    position = {node: Fraction(index) for index, node in enumerate(graph.nodes)}
    in_place = [target.name for target in _update_batch_norms(graph, copies, position)]
    for target, copy in copies.items():
        if torch_compat.is_erased(copy):
            continue
        chain = _chain_from(target, copy.args[1], position)
        if chain is not None:
            for node in chain:
                write_over(node, node.args[0])
            copy.replace_all_uses_with(copy.args[1])  # type: ignore[arg-type]
            graph.erase_node(copy)
            in_place.append(target.name)
        else:
            _move_up(target, copy, position)
    return tuple(in_place)


def _trailing_copies(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each placeholder that is updated once the ``copy_`` that does so."""
    copies: dict[fx.Node, fx.Node] = {}
    repeated: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target = node.args[0]
        if target.op == "placeholder" and isinstance(node.args[1], fx.Node):
            if target in copies:
                repeated.add(target)
            copies[target] = node
    return {target: copy for target, copy in copies.items() if target not in repeated}


def _move_up(target: fx.Node, copy: fx.Node, position: dict[fx.Node, Fraction]) -> None:
    """Move a ``copy_`` from the end to where eager updates the target: behind the old value's last reader."""
    before = {user for view in _views_of(target) for user in view.users} - {copy}
    last = max({*before, cast(fx.Node, copy.args[1])}, key=position.__getitem__)
    if last.op != "placeholder" and last.op != "output" and last.next is not copy:
        position[copy] = (position[last] + position[last.next]) / 2
        last.append(copy)


def _chain_from(target: fx.Node, value: object, position: Mapping[fx.Node, Fraction]) -> list[fx.Node] | None:
    """Return the operators that lead from ``target`` to ``value``, in order, if all may be in place."""
    chain: list[fx.Node] = []
    node = value
    while node is not target:
        if not isinstance(node, fx.Node) or not node.args:
            return None
        if in_place_form(node.target) is None and out_form(node.target) is None:
            return None
        previous = node.args[0]
        if not isinstance(previous, fx.Node) or not _fits(node, previous, target):
            return None
        if not _last_reader(node, previous, target, position):
            return None
        chain.append(node)
        node = previous
    return chain[::-1] or None


def _fits(node: fx.Node, previous: fx.Node, target: fx.Node) -> bool:
    """Return True if a link's result has the target's shape, type and layout, and aliases nothing else."""
    old, new = target.meta["val"], node.meta.get("val")
    if not isinstance(new, torch.Tensor) or new.is_complex():
        return False
    same = new.shape == old.shape and new.dtype == old.dtype and new.stride() == old.stride()
    same = same and layouts_agree(node, target)
    if _mentions(node, previous) > 1 and torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return False
    storages = {storage_key(old), *storages_of(previous.meta.get("val"))}
    others = [argument for argument in node.all_input_nodes if argument is not previous]
    return same and not any(key in storages for other in others for key in storages_of(other.meta.get("val")))


def _mentions(node: fx.Node, argument: fx.Node) -> int:
    """Count how often a node is an argument of another."""
    return sum(leaf is argument for leaf in pytree.tree_leaves((node.args, node.kwargs)))


def _last_reader(
    node: fx.Node, previous: fx.Node, target: fx.Node, position: Mapping[fx.Node, Fraction]
) -> bool:
    """Return True if every other reader of the old value, through any view, comes before ``node``."""
    readers = {user for view in _views_of(previous) for user in view.users} - {node}
    return all(
        position[user] < position[node] or (user.target is aten.copy_.default and user.args[0] is target)
        for user in readers
    )


def _views_of(node: fx.Node) -> list[fx.Node]:
    """Return a node and all views of its storage."""
    keys = {key for key in storages_of(node.meta.get("val")) if key is not None}
    views, pending = [node], [node]
    while pending:
        for user in pending.pop().users:
            if user not in views and keys & set(storages_of(user.meta.get("val"))):
                views.append(user)
                pending.append(user)
    return views


def _update_batch_norms(
    graph: fx.Graph, copies: Mapping[fx.Node, fx.Node], position: Mapping[fx.Node, Fraction]
) -> list[fx.Node]:
    """Let batch normalisations write their running statistics in place; return the statistics.

    One that runs several times, as in a checkpoint and its recomputation, reads what the time before wrote.
    """
    updated: list[fx.Node] = []
    trailing = set(copies.values())
    for last in [node for node in graph.nodes if node.target in _BATCH_NORMS]:
        results = _BATCH_NORMS[last.target][1]
        updates = [_result(last, index) for index in results]
        writes = [write for update in updates if update for write in update.users if write in trailing]
        if len(writes) != len(updates) or any(
            write.args[1] is not new for write, new in zip(writes, updates, strict=True)
        ):
            continue
        statistics = [cast(fx.Node, write.args[0]) for write in writes]
        chain = _chain_of_batch_norms(last, statistics)
        if chain and all(
            _last_reader(node, cast(fx.Node, node.args[index]), statistic, position)
            for node in chain
            for index, statistic in zip(_STATISTICS, statistics, strict=True)
        ):
            for write in writes:
                graph.erase_node(write)
            for node in chain:
                _update_in_place(node, statistics)
            updated.extend(statistics)
    return updated


def _chain_of_batch_norms(last: fx.Node, statistics: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the batch norms that statistics go through up to the last one's; empty if others change them."""
    chain = [last]
    while [chain[-1].args[index] for index in _STATISTICS] != list(statistics):
        read = [cast(fx.Node, chain[-1].args[index]) for index in _STATISTICS]
        before = read[0].args[0] if read[0].args else None
        if not isinstance(before, fx.Node) or before.target is not last.target:
            return []
        if read != [_result(before, index) for index in _BATCH_NORMS[last.target][1]]:
            return []
        chain.append(before)
    return chain


def _update_in_place(node: fx.Node, statistics: Sequence[fx.Node]) -> None:
    """Let a batch norm write into its statistics."""
    in_place, results = _BATCH_NORMS[node.target]
    updates = [_result(node, index) for index in results]
    node.target = in_place
    node.meta["val"] = node.meta["val"][: len(torch_compat.schema_of(in_place).returns)]
    for index, statistic, update in zip(_STATISTICS, statistics, updates, strict=True):
        node.update_arg(index, statistic)
        if update is not None:
            update.replace_all_uses_with(statistic)
            node.graph.erase_node(update)


def _result(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.args[1] == index), None)
