"""Computes the last linear layer, the cross entropy of its outputs, and their backward in chunks.

The logits of a language model, a row for each token and a column for each word, are its largest array by far.
Here none of that size is ever made (:mod:`olla_fx.passes.rewrites.chunks_of_loss` has the arithmetic):

* Rows by rows: logits, log-softmax and losses; their gradient; and with it the gradient of the layer's input.
* Columns by columns, for the gradient of the layer's weight, which is a sum over all rows and would be
  rounded otherwise in parts of them: logits once more, the log-softmax of which follows from two numbers of
  each row.

That is one product more than eager's three, about a tenth of the step of a small GPT-2; two where the
gradient of the loss is not known yet when forward runs, in the caller's own loop. So nobody gets it who does
not ask for it.

Bits: products choose kernels by shape, so the whole is probed. Where it is not equal, or where 16 bits do not
hold a row's numbers, a caller who allows it gets the weight's gradient added up over chunks of rows, without
the product more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.fx_graph import IN_BACKWARD, written_arguments
from olla_fx.passes.rewrites.chunks_of_loss import (
    Call,
    ChunkedLoss,
    Gradients,
    Layer,
)
from olla_fx.passes.rewrites.cross_entropies import NO_REDUCTION, CrossEntropy, cross_entropies
from olla_fx.passes.rewrites.edit import bytes_of, insert, tensor_of
from olla_fx.passes.rewrites.probes import Probe, same_bits
from olla_fx.rewrites import Change, LossChunks
from olla_fx.torch_compat import storage_key

aten = torch.ops.aten
Random: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Makes random numbers in a fake tensor's layout."""

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_LINEAR: Mapping[object, tuple[int | None, int, int]] = {
    aten.mm.default: (None, 0, 1),
    aten.addmm.default: (0, 1, 2),
}
"""Products of a layer, each with the positions of bias, input and weight."""


@dataclass(frozen=True)
class _Head:
    """A last layer with its loss.

    Attributes:
        loss: of its outputs.
        layer: its input, weight, bias and targets.
        chunked: the sizes.
        gradients: the nodes that compute the gradients that are wanted.
    """

    loss: CrossEntropy
    layer: Layer
    chunked: ChunkedLoss
    gradients: Gradients


def chunk_losses(graph: fx.Graph, chunks: LossChunks | None, probe: Probe) -> list[Change]:
    """Compute losses in chunks; see the module docstring.

    Args:
        graph: with fake values; changed. Its sizes do not vary.
        chunks: how many, and whether bits may differ; None for none.
        probe: says whether kernels give equal bits.

    Returns:
        What was changed.
    """
    changes: list[Change] = []
    if chunks is None:
        return changes
    for loss in cross_entropies(graph):
        head = _head_of(loss, chunks.count)
        if head is None:
            continue
        is_exact = _is_exact(head, probe)
        if not is_exact:
            if not chunks.may_differ:
                continue
            head = replace(head, chunked=replace(head.chunked, in_columns=False))
        above = _copied_above(head.loss)
        saved_bytes = bytes_of(loss.log_softmax) - head.chunked.largest_chunk_bytes
        changes.append(
            Change(
                "chunked_loss",
                loss.log_softmax.name,
                saved_bytes,
                head.chunked.extra_operations(in_one_pass=above is not None),
                is_exact,
            )
        )
        _replace(head, above)
    return changes


def _is_exact(head: _Head, probe: Probe) -> bool:
    if head.chunked.wants_columns and head.chunked.loss_dtype not in (torch.float32, torch.float64):
        return False
    layer = Layer(*(tensor_of(node) for node in head.layer))
    ask = partial(_is_equal_in_chunks, head.chunked, layer, probe.random)
    try:
        return probe.agrees(head.chunked.question(layer), ask)
    except torch.OutOfMemoryError:
        # Who has too little memory for whole logits is who wants chunks, and nobody can say how they compare.
        return False


def _is_equal_in_chunks(chunked: ChunkedLoss, layer: Layer, random: Random) -> bool:
    """Compute a loss and its gradients on random numbers, whole and in chunks, and compare bits.

    Args:
        chunked: the sizes.
        layer: fake tensors.
        random: makes normally distributed numbers in a fake tensor's layout.
    """
    drawn = Layer(*(_drawn(chunked, tensor, random) for tensor in layer))
    # A product's logits are about as large as a model's that has learnt something.
    drawn.weight.mul_(2 / chunked.width**0.5)
    with torch.no_grad(), torch.autocast(drawn.hidden.device.type, enabled=False):
        losses, gradients = chunked.at_once(_run, _run, drawn)
        whole_losses, whole_gradients = chunked.whole(_run, drawn)
    pairs = zip((*losses, *gradients), (*whole_losses, *whole_gradients), strict=True)
    return all(one is None or same_bits(one, other) for one, other in pairs)


def _drawn(chunked: ChunkedLoss, tensor: torch.Tensor | None, random: Random) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.is_floating_point():
        return random(tensor).abs_() if tensor.dim() == 0 else random(tensor)
    drawn = random(torch.empty(tensor.shape, device="meta")).abs_().mul_(chunked.classes / 3)
    target = drawn.to(tensor.dtype).remainder_(chunked.classes)
    return target.masked_fill_(drawn == 0, chunked.ignored)


def _run(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _head_of(loss: CrossEntropy, count: int) -> _Head | None:
    """Return the layer whose outputs a loss reads, if nothing else reads these or their gradient."""
    product = _product_of(loss.log_softmax)
    if product is None or loss.loss.args[2] is not None:
        return None
    at_bias, at_hidden, at_weight = _LINEAR[product.target]
    hidden, weight = cast(fx.Node, product.args[at_hidden]), cast(fx.Node, product.args[at_weight])
    bias = None if at_bias is None else cast(fx.Node, product.args[at_bias])
    gradients = _gradients_of(loss.gradient, hidden, weight)
    above = tensor_of(loss.loss_backward.args[0])
    if gradients is None or above is None or (above.dim() > 0) != (loss.reduction == NO_REDUCTION):
        return None
    if bias is not None and cast(torch.Tensor, tensor_of(bias)).dim() != 1:
        return None
    layer = Layer(hidden, weight, bias, loss.loss.args[1], above=loss.loss_backward.args[0])
    rows, width = cast(torch.Tensor, tensor_of(hidden)).shape
    chunked = ChunkedLoss(
        rows,
        cast(torch.Tensor, tensor_of(weight)).shape[1],
        width,
        count,
        product.meta["val"].dtype,
        loss.log_softmax.meta["val"].dtype,
        loss.reduction,
        cast(int, loss.loss.args[4]),
        Gradients(*(node is not None for node in gradients)),
    )
    return _Head(loss, layer, chunked, gradients) if chunked.is_possible else None


def _product_of(log_softmax: fx.Node) -> fx.Node | None:
    """Return the product that gives logits, through views and one conversion, each for the next alone."""
    node, conversions = cast(fx.Node, log_softmax.args[0]), 0
    while list(node.users) and len(node.users) == 1:
        if node.target in _LINEAR:
            same = node.meta["val"].shape == log_softmax.meta["val"].shape
            return node if same and not node.kwargs else None
        if _is_conversion(node):
            conversions += 1
        elif node.target not in _VIEWS:
            return None
        if conversions > 1:
            return None
        node = cast(fx.Node, node.args[0])
    return None


def _is_conversion(node: fx.Node) -> bool:
    """Return True if a node has the elements of another one in another type, and nothing else differs."""
    if node.target is not aten._to_copy.default:
        return False
    old, new = cast(fx.Node, node.args[0]).meta["val"], node.meta["val"]
    return bool(old.device == new.device and old.stride() == new.stride())


def _gradients_of(gradient: fx.Node, hidden: fx.Node, weight: fx.Node) -> Gradients | None:
    """Return what is computed from the gradient of logits, if that is the gradients of a linear layer."""
    gradients: dict[str, fx.Node] = {}
    pending = [gradient]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target in _VIEWS or _is_conversion(user):
                pending.append(user)
                continue
            if user.target is aten.t.default:
                if not all(_is_product(product, user, hidden) for product in user.users):
                    return None
                kinds = [("weight", product) for product in user.users]
            elif user.target is aten.mm.default and _is_back_product(user, node, weight):
                kinds = [("hidden", user)]
            elif user.target is aten.sum.dim_IntList and user.args == (node, [0], True):
                kinds = [("bias", user)]
            else:
                return None
            is_matrix = node.meta["val"].shape == gradient.meta["val"].shape
            if not is_matrix or len(kinds) != 1 or kinds[0][0] in gradients:
                return None
            gradients.update(kinds)
    return (
        Gradients(gradients.get("hidden"), gradients.get("weight"), gradients.get("bias"))
        if gradients
        else None
    )


def _is_product(product: fx.Node, transposed: fx.Node, hidden: fx.Node) -> bool:
    is_product = product.target is aten.mm.default and product.args[0] is transposed
    return is_product and _is_same(product.args[1], hidden)


def _is_back_product(product: fx.Node, gradient: fx.Node, weight: fx.Node) -> bool:
    back = product.args[1]
    if product.args[0] is not gradient or not isinstance(back, fx.Node):
        return False
    return back.target is aten.t.default and _is_same(back.args[0], weight)


def _is_same(node: Any, other: fx.Node) -> bool:
    """Return True if two nodes are the same elements, through views that change nothing."""
    one, two = tensor_of(node), cast(torch.Tensor, tensor_of(other))
    if one is None or one.dtype != two.dtype or one.shape != two.shape or one.stride() != two.stride():
        return False
    return storage_key(one) == storage_key(two) and one.storage_offset() == two.storage_offset()


def _copied_above(loss: CrossEntropy) -> fx.Node | None:
    """Return a copy of a loss's gradient that does not wait for the loss; None if it depends on more.

    Where a step begins backward itself, the gradient of its loss is a one, times what the loss is divided by.
    """
    before = loss.loss
    forward: set[fx.Node] = set()
    for node in before.graph.nodes:
        if node is before:
            break
        forward.add(node)
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node | None:
        if node in copies:
            return copies[node]
        if node.op == "placeholder" and all(user.meta.get(IN_BACKWARD) for user in node.users):
            return None
        if node in forward:
            return node
        if not node.meta.get(IN_BACKWARD) or written_arguments(node):
            return None
        if node.target is aten.ones_like.default:
            value = cast(torch.Tensor, tensor_of(node))
            options = {"dtype": value.dtype, "device": value.device}
            copy = insert(
                before, aten.new_ones.default, (loss.loss.args[1], list(value.shape)), options, like=node
            )
        else:
            sources = {source: copied(source) for source in node.all_input_nodes}
            if None in sources.values():
                return None
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: sources[source])
            copy = insert(before, node.target, args, kwargs, like=node)
        copies[node] = copy
        return copy

    return copied(cast(fx.Node, loss.loss_backward.args[0]))


def _replace(head: _Head, above: fx.Node | None) -> None:
    """Put the computation in chunks in the place of the whole one.

    Args:
        head: what to replace.
        above: the gradient of the loss if it is known before the loss.
    """
    old, layer, chunked = head.loss, head.layer, head.chunked
    forward = _inserter(old.loss, like=old.log_softmax)
    if above is not None:
        backward = _inserter(old.loss, like=old.gradient)
        losses, gradients = chunked.at_once(forward, backward, Layer(*layer[:-1], above))
    else:
        losses = chunked.forward(forward, layer)
        gradients = chunked.backward(_inserter(old.loss_backward, like=old.gradient), layer, losses.total)
    results = {user.args[1]: user for user in old.loss.users}
    pairs = [
        *zip(head.gradients, gradients, strict=True),
        *((results.get(at), new) for at, new in enumerate(losses)),
    ]
    for node, new in pairs:
        if node is not None:
            node.replace_all_uses_with(new)
    _erase([node for node, _ in pairs if node is not None])


def _inserter(before: fx.Node, like: fx.Node) -> Call:
    """Return what inserts an operator in front of a node."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert(before, target, args, kwargs, like=like)

    return call


def _erase(nodes: list[fx.Node]) -> None:
    """Erase nodes that nobody uses, and what only they have used."""
    while nodes:
        node = nodes.pop()
        if node.op == "call_function" and not node.users and not torch_compat.is_erased(node):
            nodes.extend(node.all_input_nodes)
            node.graph.erase_node(node)
