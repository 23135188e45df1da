"""Turns operators into their in-place forms: if eager does so, and if nobody could tell.

Functionalisation gives each result a storage of its own. ``ReLU(inplace=True)``, ``x += shortcut`` and
the gates of a recurrent cell then hold an activation twice that eager holds once. Two rules undo it:

* An element-wise operator, a softmax, or BatchNorm with given statistics writes its result over an argument
  of the same layout that is read by nobody else, or only by operators that it waits for anyway (in-place
  operation, sublinear memory §3). No order of the graph needs more memory for it: at the operator, the old
  and the new value would both be alive.
* ``copy(x, op(x, ..))``, which capture leaves where eager works in place on a tensor with gaps
  (:mod:`olla_fx.capture.eager_numerics`), becomes ``op_(x, ..)`` if no reader of the old value follows,
  else a copy into a new tensor of the same strides.

The in-place and ``out=`` forms of an operator run the kernel of the functional form over memory in the
same way, so that the bits are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from operator import is_not

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.fx_graph import (
    LAYOUTS,
    draws_random_numbers,
    layout_of,
    layouts_agree,
    number_argument,
)
from olla_fx.passes.boundary import tied_to_boundary
from olla_fx.passes.in_place_forms import (
    in_place_form,
    is_element_wise,
    may_write_over,
    overwritable_arguments,
    write_over,
)
from olla_fx.passes.phases import phase_starts
from olla_fx.passes.regions import Regions, has_known_elements
from olla_fx.torch_compat import pytree

aten = torch.ops.aten
# Operators that only copy their second argument: its strides do not matter to them.
_COPIES = frozenset(
    {
        aten.copy_.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)


def reinplace(graph: fx.Graph, *, keep_phases: bool = False) -> int:
    """Let operators write over their arguments; see the module docstring.

    Args:
        graph: propagated with fake tensors; changed. Its metadata is out of date afterwards.
        keep_phases: True if nothing is to be written over what an earlier phase made.

    Returns:
        The number of operators that now work in place.
    """
    regions = Regions(graph)
    ancestors = _ancestors(graph)
    starts = phase_starts(graph) if keep_phases else ()
    count = 0
    for node in list(graph.nodes):
        if node in starts:
            regions.keep(itertools.takewhile(partial(is_not, node), graph.nodes))
        if node.op != "call_function" or torch_compat.is_erased(node):
            continue
        if node.target is aten.copy.default:
            count += _reinplace_copy(node, regions)
            continue
        target = _target_for(node, regions, ancestors)
        if target is not None:
            regions.move(node, target)
            write_over(node, target)
            count += 1
    return count


def _target_for(node: fx.Node, regions: Regions, ancestors: Mapping[fx.Node, int]) -> fx.Node | None:
    """Return the first argument whose storage can become the result's, at no cost in any order."""
    for argument in overwritable_arguments(node):
        if fits_over(node, argument, regions) and _may_share(node, argument, regions, ancestors):
            return argument
    return None


def fits_over(node: fx.Node, target: fx.Node, regions: Regions) -> bool:
    """Return True if a kernel can write an element-wise operator's result over an argument.

    Others may still need the argument.
    """
    if regions.is_kept(node) or regions.is_kept(target) or target not in overwritable_arguments(node):
        return False
    return _same_layout(node, target) and _arguments_agree(node, target)


def _may_share(node: fx.Node, target: fx.Node, regions: Regions, ancestors: Mapping[fx.Node, int]) -> bool:
    readers = _readers_if_overwritten(node, target, regions)
    if readers is None:
        return False
    return all(ancestors[node] >> regions.position[reader] & 1 for reader in readers - {node})


def _same_layout(node: fx.Node, target: fx.Node) -> bool:
    """Return True if both have the same shape, type and strides, and fill their storages."""
    result, old = node.meta.get("val"), target.meta.get("val")
    if isinstance(result, tuple):
        result = result[0]
    if not has_known_elements(result) or not has_known_elements(old):
        return False
    same = result.shape == old.shape and result.dtype == old.dtype and result.stride() == old.stride()
    size_bytes = result.numel() * result.element_size()
    filled = result.untyped_storage().nbytes() == old.untyped_storage().nbytes() == size_bytes
    always = all(layout is None or layout.fills_storage for layout in map(layout_of, (node, target)))
    return same and filled and always and layouts_agree(node, target) and not result.is_complex()


def _arguments_agree(node: fx.Node, target: fx.Node) -> bool:
    """Return True if all arguments of the result's shape have the strides of ``target``, or are expanded.

    If they do not, the layout of a fake result is not always that of a real one (``elu_backward``).
    """

    def strides(value: torch.Tensor) -> list[int]:
        pairs = zip(value.shape, value.stride(), strict=True)
        return [stride for size, stride in pairs if size != 1]

    old = target.meta["val"]
    values = [(argument, argument.meta.get("val")) for argument in node.all_input_nodes]
    of_shape = [
        (argument, value)
        for argument, value in values
        if has_known_elements(value) and value.shape == old.shape
    ]
    return all(
        (strides(value) == strides(old) and layouts_agree(argument, target)) or 0 in strides(value)
        for argument, value in of_shape
    )


def may_overwrite(node: fx.Node, target: fx.Node, regions: Regions, until: fx.Node | None = None) -> bool:
    """Return True if ``node`` may write to ``target`` in its place in the graph.

    That is so if nobody reads the old value later, except ``until``, and the node itself reads it in no
    other way.
    """
    return _readers_if_overwritten(node, target, regions, until) is not None


def _readers_if_overwritten(
    node: fx.Node, target: fx.Node, regions: Regions, until: fx.Node | None = None
) -> set[fx.Node] | None:
    """Return who reads ``target``, but ``until``, if :func:`may_overwrite`; None if not."""
    if regions.is_kept(target):
        return None
    (region,) = regions.of(target)
    readers = regions.readers(region) - {until}
    if any(regions.position[reader] > regions.position[node] for reader in readers):
        return None
    overlapping = [
        argument_region
        for leaf in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(leaf, fx.Node) and leaf is not target
        for argument_region in regions.of(leaf)
        if argument_region.overlaps(region)
    ]
    may_write = all(may_write_over(node.target) and other == region for other in overlapping)
    return readers if may_write else None


def _reinplace_copy(copy: fx.Node, regions: Regions) -> bool:
    """Make ``copy(target, value)`` what eager did: an operator in place (True), or a write to ``target``."""
    target, value = copy.args[0], copy.args[1]
    if not isinstance(target, fx.Node) or not isinstance(value, fx.Node) or not regions.of(target):
        return False
    only_copied = all(user.target in _COPIES and user.args[1] is copy for user in copy.users)
    if only_copied and _same_kind(copy, value):
        copy.replace_all_uses_with(value)
        copy.graph.erase_node(copy)
        return False
    returned = regions.is_kept(copy)
    fused = not returned and _is_value_of_target(copy, target, value)
    if fused and may_overwrite(value, target, regions, until=copy):
        regions.add(value, copy.meta["val"], regions.position[value])
        copy.replace_all_uses_with(value)
        copy.graph.erase_node(copy)
        regions.move(value, target)
        write_over(value, target)
        return True
    if not returned and may_overwrite(copy, target, regions):
        regions.move(copy, target)
    else:
        _copy_into_new_tensor(copy, regions)
    copy.target = aten.copy_.default
    return False


def _same_kind(copy: fx.Node, value: fx.Node) -> bool:
    """Return True if a copy neither broadcasts nor converts."""
    copied, original = copy.meta["val"], value.meta["val"]
    return bool(copied.shape == original.shape and copied.dtype == original.dtype)


def _is_value_of_target(copy: fx.Node, target: fx.Node, value: fx.Node) -> bool:
    """Return True if a copied value is an element-wise operator, first on ``target``, and only copied."""
    return (
        is_element_wise(value.target)
        and not draws_random_numbers(value)
        and in_place_form(value.target) is not None
        and value.args[0] is target
        and list(value.users) == [copy]
        and value.meta["val"].dtype == target.meta["val"].dtype
        and not target.meta["val"].is_complex()
    )


def _copy_into_new_tensor(copy: fx.Node, regions: Regions) -> None:
    value = copy.meta["val"]
    layout = layout_of(copy)
    shape, stride = (value.shape, value.stride()) if layout is None else (layout.shape, layout.stride)
    numbers = [[number_argument(copy.graph, number) for number in row] for row in (shape, stride)]
    with copy.graph.inserting_before(copy):
        target = copy.graph.call_function(aten.new_empty_strided.default, (copy.args[0], *numbers))
    if layout is not None:
        target.meta[LAYOUTS] = [layout]
    regions.add(target, value, regions.position[copy])
    copy.update_arg(0, target)


def _ancestors(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node the positions of those that precede it in every order, as the bits of a number.

    A gradient that the caller comes back with follows from no node of forward. What reads it waits for the
    forward/backward boundary, and that for all that forward's outputs need.
    """
    boundary, tied = tied_to_boundary(graph)
    stays = frozenset(tied)
    ancestors: dict[fx.Node, int] = {}
    before_boundary = 0
    for index, node in enumerate(graph.nodes):
        reached = 1 << index
        for source in node.all_input_nodes:
            reached |= ancestors[source]
        if node is boundary or (node in stays and boundary in ancestors):
            reached |= before_boundary
        if node is boundary or (node in stays and boundary not in ancestors):
            before_boundary |= reached
        ancestors[node] = reached
    return ancestors
