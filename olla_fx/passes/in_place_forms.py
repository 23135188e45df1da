"""The in-place and ``out=`` forms of operators: the same kernel, writing over an argument.

It must read each element before it writes there. Element-wise operators do, and so do softmaxes, which go
over a row to add up and once more to write, and BatchNorm with given statistics: a channel's mean and
variance become two numbers before its elements are read, one at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.fx_graph import LAYOUTS, draws_random_numbers
from olla_fx.torch_compat import overload_name, schema_of

aten = torch.ops.aten

_ELEMENT_WISE_WITHOUT_TAG = frozenset(
    {
        aten.hardswish.default,
        aten.hardtanh_backward.default,
        aten.hardsigmoid_backward.default,
        aten.leaky_relu_backward.default,
        aten.elu_backward.default,
    }
)

_SOFTMAXES = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    }
)
"""Operators that need all of a row for its elements, and have read it when they begin to write there."""

_NORMALISATION = aten._native_batch_norm_legit_no_training.default
_NORMALISATION_OUT = aten.native_batch_norm.out


def overwritable_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operator has a form for that writes its first result over them."""
    if node.target is _NORMALISATION:
        statistics_unread = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
        on_cpu = all(result.device.type == "cpu" for result in node.meta["val"])
        return list(node.all_input_nodes[:1]) if statistics_unread and on_cpu else []
    if not may_write_over(node.target) or draws_random_numbers(node):
        return []
    if out_form(node.target) is not None:
        return list(node.all_input_nodes)
    first = node.args[0] if in_place_form(node.target) is not None else None
    return [first] if isinstance(first, fx.Node) else []


@functools.cache
def in_place_form(target: object) -> torch_compat.OpOverload | None:
    """Return the in-place form of an operator: same arguments, first one written to; None without one."""
    if not isinstance(target, torch_compat.OpOverload) or target.namespace not in ("aten", "olla_fx"):
        return None
    namespace, name = schema_of(target).name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    form = getattr(packet, overload_name(target), None)
    if not isinstance(form, torch_compat.OpOverload):
        return None
    arguments = schema_of(form).arguments
    writes = arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    return form if writes and _signature(arguments) == _signature(schema_of(target).arguments) else None


@functools.cache
def out_form(target: object) -> torch_compat.OpOverload | None:
    """Return the ``out=`` form of an operator of :func:`may_write_over` if it has a kernel for it."""
    if not may_write_over(target):
        return None
    packet, signature = target.overloadpacket, _signature(schema_of(target).arguments)  # type: ignore[attr-defined]
    for name in packet.overloads():
        form: torch_compat.OpOverload = getattr(packet, name)
        arguments = schema_of(form).arguments
        # The generated forms compute into a new tensor and copy it.
        if arguments and arguments[-1].is_out and torch.Tag.generated not in form.tags:
            if _signature(arguments[:-1]) == signature:
                return form
    return None


def is_element_wise(target: object) -> bool:
    """Return True if each element of the one result depends on the same elements of the arguments only."""
    return isinstance(target, torch_compat.OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _ELEMENT_WISE_WITHOUT_TAG
    )


def may_write_over(target: object) -> bool:
    """Return True if an operator may write its one result over an argument of the same layout.

    It is element-wise, or a softmax: its kernels go over a row to add up, and then once more, element by
    element, to write. PyTorch's own attention has its scores' softmax written over them.
    """
    return is_element_wise(target) or target in _SOFTMAXES


def _signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.real_type)) for argument in arguments]


def write_over(node: fx.Node, argument: Any) -> None:
    """Let an operator write its result over one of its :func:`overwritable_arguments`."""
    if node.target is _NORMALISATION:
        _normalise_in_place(node)
        return
    in_place = in_place_form(node.target)
    if in_place is not None and argument is node.args[0]:
        node.target = in_place
        return
    form = out_form(node.target)
    if form is None:
        raise ValueError(f"{node.target} can write to no argument")
    node.target = form
    node.update_kwarg(schema_of(form).arguments[-1].name, argument)


def _normalise_in_place(node: fx.Node) -> None:
    """Let BatchNorm with given statistics write over its input.

    The form also takes tensors for statistics that it saves when it computes them; here they are empty.
    """
    *arguments, momentum, epsilon = node.args
    _, unsaved, _ = node.meta["val"]
    with node.graph.inserting_before(node):
        options = {"dtype": unsaved.dtype, "device": unsaved.device}
        empty = node.graph.call_function(aten.empty.memory_format, ([0],), options)
    empty.meta["val"] = unsaved
    if LAYOUTS in node.meta:
        empty.meta[LAYOUTS] = [node.meta[LAYOUTS][1]]
    node.target = _NORMALISATION_OUT
    node.args = (*arguments, False, momentum, epsilon)
    node.kwargs = {"out": node.args[0], "save_mean": empty, "save_invstd": empty}
