"""Takes the gradient of a clamped activation from its output instead of its input.

``hardtanh_backward`` (of ReLU6, too) passes a gradient where the input lies between the limits. The output is
the input, limited: it is at a limit where the input is there or beyond, and NaN where that is NaN, so that it
gives the same answers. Leaky ReLU's backward has a form of its own for outputs; with a positive slope, output
and input have one sign.

The forward limits to the nearest numbers that a type has, the backward compares with the numbers given, so
these must be the same. An output that the caller gets may be changed before backward, so backward does not
read it.

Harmless: an input that nothing else reads later is dead behind the activation, whose output can take its
place in memory. It was alive until backward before, and so were both where the output is kept, too.

Other activations' outputs do not tell their inputs: hardsigmoid's, hardswish's, SiLU's and GELU's do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from olla_fx.fx_graph import ancestors
from olla_fx.passes.rewrites.edit import bytes_of, holds_exactly, is_returned, readers_of, same_layout
from olla_fx.rewrites import Change

aten = torch.ops.aten
_LIMITS = -1, 1
_SLOPE = 0.01


def take_outputs_of_activations(graph: fx.Graph) -> list[Change]:
    """Let backward read outputs; see the module docstring.

    Args:
        graph: with fake values; changed.

    Returns:
        What was changed.
    """
    changes = []
    for activation in (aten.hardtanh.default, aten.leaky_relu.default):
        for forward in graph.find_nodes(op="call_function", target=activation):
            for backward in _backwards_of(forward):
                if _is_dead_behind(forward.args[0], forward, backward):
                    changes.append(Change("activation_outputs", backward.name, bytes_of(forward.args[0])))
                    _read_output(forward, backward)
    return changes


def _backwards_of(forward: fx.Node) -> list[fx.Node]:
    """Return the operators that read an activation's input for its gradient, with the same numbers."""
    if not isinstance(forward.args[0], fx.Node) or not same_layout(forward, forward.args[0]):
        return []
    return [user for user in forward.args[0].users if _is_backward_of(user, forward)]


def _is_backward_of(user: fx.Node, forward: fx.Node) -> bool:
    if user.args[1:2] != forward.args[:1] or user.args[0] is forward.args[0]:
        return False
    if forward.target is aten.hardtanh.default:
        is_backward = user.target is aten.hardtanh_backward.default
        limits = _numbers(forward.args[1:], _LIMITS)
        dtype = forward.meta["val"].dtype
        same = is_backward and limits == _numbers(user.args[2:], _LIMITS)
        return same and all(holds_exactly(limit, dtype) for limit in limits)
    (slope,) = _numbers(forward.args[1:], (_SLOPE,))
    is_backward = user.target is aten.leaky_relu_backward.default and user.args[2:] == (slope, False)
    return is_backward and isinstance(slope, int | float) and slope > 0


def _numbers(given: tuple[Any, ...], defaults: tuple[float, ...]) -> tuple[Any, ...]:
    return given + defaults[len(given) :]


def _is_dead_behind(argument: Any, forward: fx.Node, backward: fx.Node) -> bool:
    """Return True if all other readers of an activation's input come before the activation."""
    if argument.op != "call_function" or is_returned(forward):
        return False
    return set(readers_of(argument)) - {backward} <= ancestors([forward])


def _read_output(forward: fx.Node, backward: fx.Node) -> None:
    backward.update_arg(1, forward)
    if backward.target is aten.leaky_relu_backward.default:
        backward.update_arg(3, True)
