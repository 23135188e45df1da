"""Repeats a stretch of a graph that is being traced, with other tensors in the place of its own.

Tracing an operator takes some milliseconds. If it is known that the same operators follow for tensors of the
same layouts, their nodes are copied instead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import functional_utils as _functional
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.utils import _python_dispatch

from olla_fx.torch_compat.tensors import pytree, storage_key


@dataclass
class TracedNodes:
    """What was traced for some tensors.

    Attributes:
        before: the node of each tensor's value before.
        after: the node of each tensor's value afterwards; the same one if it was not written to.
        nodes: those that were traced in between, in order.
    """

    before: Sequence[fx.Node]
    after: Sequence[fx.Node] = ()
    nodes: Sequence[fx.Node] = ()

    @property
    def can_be_repeated(self) -> bool:
        """True if all nodes are calls, each with results in storages of their own."""
        storages = {key for node in self.before for key in _storages_of(node)}
        for node in self.nodes:
            made = _storages_of(node)
            if node.op != "call_function" or not storages.isdisjoint(made):
                return False
            storages.update(made)
        return len(set(self.before)) == len(self.before)


@contextlib.contextmanager
def nodes_traced_for(tensors: Sequence[torch.Tensor]) -> Iterator[TracedNodes]:
    """Note what is traced meanwhile; what is yielded is complete at the end.

    Args:
        tensors: of the function that is traced, those that it reads and writes meanwhile.
    """
    traced = TracedNodes([_node_of(tensor) for tensor in tensors])
    graph = _tracer().graph
    last = next(iter(reversed(graph.nodes)), None)
    yield traced
    new = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    traced.nodes = list(new)[::-1]
    traced.after = [_node_of(tensor) for tensor in tensors]


def repeat_nodes(traced: TracedNodes, tensors: Sequence[torch.Tensor]) -> None:
    """Trace once more what was noted, for other tensors; those that it writes to get new values.

    Args:
        traced: from :func:`nodes_traced_for`; it can be repeated.
        tensors: one of the same type and layout for each of those that it was traced for.
    """
    tracer = _tracer()
    own = [_node_of(tensor) for tensor in tensors]
    copies = dict(zip(traced.before, own, strict=True))
    with _python_dispatch._disable_current_modes():
        for node in traced.nodes:
            copies[node] = tracer.graph.node_copy(node, lambda argument: copies.get(argument, argument))
            copies[node].meta = {
                **node.meta,
                "val": pytree.tree_map_only(torch.Tensor, _twin_of, node.meta["val"]),
            }
        for tensor, before, after in zip(tensors, traced.before, traced.after, strict=True):
            if after is not before:
                _write(tensor, copies.get(after, after), tracer)


def _tracer() -> Any:
    mode = _proxy_tensor.get_proxy_mode()
    if mode is None:
        raise RuntimeError("nothing is traced")
    return mode.tracer


def _node_of(tensor: torch.Tensor) -> fx.Node:
    """Return the node that computes a traced tensor's present value."""
    value: Any = _functional.from_fun(tensor)
    node: fx.Node = _proxy_tensor.get_proxy_slot(value, _tracer()).proxy.node
    return node


def _storages_of(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _twin_of(tensor: Any) -> torch.Tensor:
    """Return a fake tensor of the same layout in a storage of its own."""
    with tensor.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _write(tensor: Any, node: fx.Node, tracer: Any) -> None:
    """Let a node be the value of a traced tensor from now on."""
    value = node.meta["val"]
    _proxy_tensor.track_tensor_tree(value, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()
