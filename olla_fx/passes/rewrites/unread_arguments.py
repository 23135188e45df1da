"""Drops arguments of which backward reads the shape alone.

The backward of a pooling is told the pooled tensor, and asks for nothing but how it lies in memory: maxima
have their positions noted, means need no values. The operators of :mod:`olla_fx.operators` take shape and
strides instead, and run the same kernel.

Harmless: an operator reads less.
"""

from __future__ import annotations

from torch import fx

from olla_fx import operators
from olla_fx.fx_graph import layout_of
from olla_fx.passes.rewrites.edit import bytes_of, has_own_layout, insert, shape_arguments
from olla_fx.rewrites import Change


def drop_unread_arguments(graph: fx.Graph) -> list[Change]:
    """Give backwards of poolings the shape of their input; see the module docstring.

    Args:
        graph: with fake values; changed.

    Returns:
        What was changed.
    """
    changes = []
    for original, by_shape in operators.POOLING_BACKWARDS.items():
        for node in list(graph.find_nodes(op="call_function", target=original)):
            source = node.args[1]
            if node.kwargs or not has_own_layout(node, source):
                continue
            arguments = (node.args[0], *shape_arguments(node), *node.args[2:])
            new = insert(node, by_shape, arguments, layout=layout_of(node))
            changes.append(Change("unread_arguments", node.name, bytes_of(source)))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return changes
