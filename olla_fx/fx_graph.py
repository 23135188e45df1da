"""Properties of nodes of an fx graph that was propagated with fake tensors, for every stage.

Whether two tensors share a storage is read off the fake tensors, never off operator names: ``reshape`` may or
may not copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.errors import CaptureError
from olla_fx.torch_compat import pytree, schema_of, storage_key

IN_BACKWARD = "in_backward"
"""Key of ``node.meta``: True if eager's backward runs the node's operator."""

RECOMPUTED = "recomputed"
"""Key of ``node.meta``: True if a checkpoint runs the operator again to get back what it did not save."""

REPEATED = "repeated"
"""Key of ``node.meta``: True if the node is there to make again in backward what forward made and dropped."""

SOURCE = "source"
"""Key of ``node.meta``: the file and line of the code that called the operator, PyTorch's and ours aside."""

LAYOUTS = "layouts"
"""Key of ``node.meta`` in a graph whose sizes vary: a :class:`Layout` for each flattened item of the node's
value, None if it is no tensor."""

_SIZE = "size_"


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from the sizes of a step's inputs.

    Attributes:
        index: of its formula.
        divisor: divides it, whatever the sizes.
        parts: what the formula's value is divided by, which leaves no rest.
    """

    index: int
    divisor: int = field(default=1, compare=False)
    parts: int = 1

    @staticmethod
    def of_name(name: str) -> Size | None:
        """Return the number that an attribute of a graph module stands for, if it does."""
        index = name.removeprefix(_SIZE)
        return Size(int(index)) if name.startswith(_SIZE) and index.isdecimal() else None


def size_name(size: Size) -> str:
    """Return the attribute of a graph module that holds a number.

    Raises:
        ValueError: if it is a part of a formula's value, which no attribute holds.
    """
    if size.parts > 1:
        raise ValueError(f"formula {size.index} is no argument of an operator in {size.parts} parts")
    return f"{_SIZE}{size.index}"


def part_of(number: Any, parts: int) -> Any:
    """Return a number, or a :class:`Size`, divided by one that leaves no rest at any size.

    Raises:
        ValueError: if that is not known.
    """
    if not isinstance(number, Size):
        return number // parts
    if number.divisor % parts:
        raise ValueError(f"formula {number.index} may have a rest in {parts} parts")
    return Size(number.index, number.divisor // parts, number.parts * parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and place of a tensor whose sizes vary: numbers, and :class:`Size` for those that do.

    Attributes:
        shape: its extents.
        stride: its element strides.
        offset: where it begins in its storage, in elements.
        storage_bytes: of its storage.
        own_bytes: of its elements.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    storage_bytes: Any
    own_bytes: Any

    @property
    def fills_storage(self) -> bool:
        """True if it has as many bytes as its storage, whatever the sizes."""
        return bool(self.storage_bytes == self.own_bytes)


def layouts_agree(node: fx.Node, other: fx.Node) -> bool:
    """Return True if two nodes of one shape and strides, here, have the same at all sizes.

    Without sizes that vary it is as it is here.
    """
    one, two = layout_of(node), layout_of(other)
    return one is None or two is None or (one.shape, one.stride) == (two.shape, two.stride)


def layout_of(node: fx.Node) -> Layout | None:
    """Return the layout of a node's one tensor; None if its sizes do not vary."""
    layouts = node.meta.get(LAYOUTS)
    return layouts[0] if layouts else None


def number_argument(graph: fx.Graph, number: Any) -> Any:
    """Return what stands for a number as an argument of a node; a :class:`Size` is an attribute."""
    if not isinstance(number, Size):
        return number
    known = graph.find_nodes(op="get_attr")
    for node in known:
        if node.target == size_name(number):
            return node
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        return graph.create_node("get_attr", size_name(number))


_RAISING = frozenset(
    overload
    for name in (
        # an index out of range
        "embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_", "nll_loss_forward",
        "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward", "index", "_unsafe_index",
        "index_select", "gather", "take", "put", "scatter", "scatter_add", "scatter_reduce", "index_put",
        "_unsafe_index_put", "index_add", "index_copy", "index_fill", "index_reduce", "masked_scatter",
        "max_unpool2d", "max_unpool3d", "_ctc_loss", "repeat_interleave", "bincount", "segment_reduce",
        # a probability or a scale out of range
        "binary_cross_entropy", "bernoulli", "multinomial", "normal", "poisson", "binomial",
        # a matrix without a decomposition
        "_linalg_svd", "_linalg_eigh", "linalg_eig", "cholesky", "linalg_lstsq",
    )
    for packet in (getattr(torch.ops.aten, name, None), getattr(torch.ops.aten, f"{name}_", None))
    if packet is not None
    for overload in (getattr(packet, overload_name) for overload_name in packet.overloads())
)  # fmt: skip
"""Operators whose kernels on the CPU check values, and raise."""


def source_of(node: fx.Node) -> str:
    """Return the line that called a node's operator, with the end of its file's name; empty if unknown."""
    source = node.meta.get(SOURCE)
    return "" if source is None else "/".join(Path(source).parts[-2:])


def storages_of(value: object) -> list[int | None]:
    """Return the storage of each flattened item of a node's value; None if it is no tensor."""
    if isinstance(value, torch.Tensor):  # quickly, as most values are
        return [storage_key(value)]
    return [
        storage_key(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(value)
    ]


def given_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of an operator's schema with what a node gives for it; None if it gives nothing."""
    for position, argument in enumerate(schema_of(node.target).arguments):
        yield argument, node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)


def is_written(argument: Any) -> bool:
    """Return True if an operator writes to an argument of its schema."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the argument nodes that an operator writes to, by its schema."""
    if not isinstance(node.target, torch_compat.OpOverload):
        return []
    written: list[fx.Node] = []
    for position, name in _written_positions(node.target):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        written.extend(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))
    return written


@functools.cache
def _written_positions(target: torch_compat.OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an operator writes to."""
    arguments = enumerate(schema_of(target).arguments)
    return tuple((position, argument.name) for position, argument in arguments if is_written(argument))


def draws_random_numbers(node: fx.Node) -> bool:
    """Return True if an operator advances the random generator, or reads or sets its state."""
    if not isinstance(node.target, torch_compat.OpOverload):
        return False
    return may_draw(node.target) and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Return True for an attention without dropout, which asks the generator for nothing."""
    rates = [
        argument.default_value if given is None else given
        for argument, given in given_arguments(node)
        if argument.name == "dropout_p"
    ]
    return bool(rates) and all(rate == 0.0 for rate in rates)


def may_draw(operator: torch_compat.OpOverload) -> bool:
    """Return True if an operator may draw random numbers, or reads or sets the generator's state."""
    return torch.Tag.nondeterministic_seeded in operator.tags and operator not in _NEVER_DRAW


_NEVER_DRAW = frozenset({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default})
"""Operators that are tagged as random but refuse to drop anything."""


_DIVIDING = frozenset(
    overload
    for name in ("div", "div_", "floor_divide", "floor_divide_", "remainder", "remainder_", "fmod", "fmod_")
    for overload in (
        getattr(getattr(torch.ops.aten, name), kind) for kind in getattr(torch.ops.aten, name).overloads()
    )
)
"""Operators that raise if they divide an integer by 0."""


def may_raise(node: fx.Node) -> bool:
    """Return True if an operator raises for some values of its arguments: an index out of range, say.

    One that is repeated did not, or the step would be over.
    """
    if node.meta.get(REPEATED):
        return False
    value = node.meta.get("val")
    is_integral = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return node.target in _RAISING or (is_integral and node.target in _DIVIDING)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if a tensor is on a device; a device without an index stands for all of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def forward_backward_boundary(results: Sequence[object], tangents: Sequence[object]) -> None:
    """Mark where the caller gets the results of forward and comes back with tangents for backward.

    :mod:`olla_fx.passes.boundary` puts it into the graph of a step in the caller's own loop.
    """


def end_of_backward(gradients: Sequence[object]) -> None:
    """Mark where all gradients are there; see :func:`forward_backward_boundary`."""


def first_of_backward(graph: fx.Graph) -> fx.Node | None:
    """Return the node that stands between forward and backward, or where backward begins; None without it.

    All that follows it in a captured graph belongs to backward or the update, but in the caller's own loop,
    where operators that the caller cannot notice may run on either side.
    """
    boundaries = graph.find_nodes(op="call_function", target=forward_backward_boundary)
    return next(
        (node for node in boundaries or graph.nodes if boundaries or node.meta.get(IN_BACKWARD)), None
    )


_MARKERS = frozenset({forward_backward_boundary, end_of_backward})


def is_marker(node: fx.Node) -> bool:
    """Return True if a node stands for a moment of the step and computes nothing."""
    return node.target in _MARKERS


def is_free(node: fx.Node) -> bool:
    """Return True if a node takes no memory and no time: a view, ``getitem``, arithmetic on Python numbers.

    Raises:
        CaptureError: if the node calls something whose memory cannot be seen.
    """
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return True
    if is_marker(node):
        return False
    tensors = [key for key in storages_of(node.meta.get("val")) if key is not None]
    if not isinstance(node.target, torch_compat.OpOverload):
        if tensors:
            raise CaptureError(
                f"the graph calls {node.target}, a construct whose memory olla_fx cannot see "
                f"(node {node.name})"
            )
        return True
    if not tensors or schema_of(node.target).is_mutable:
        return False
    sources = {key for argument in node.all_input_nodes for key in storages_of(argument.meta.get("val"))}
    return all(key in sources for key in tensors)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose storage a chain of views shares."""
    while node.op == "call_function" and node.all_input_nodes and is_free(node):
        node = node.all_input_nodes[0]
    return node


def free_nodes_before(
    node: fx.Node, emitted: Mapping[fx.Node, object], operators: frozenset[fx.Node]
) -> Iterator[fx.Node]:
    """Yield the free nodes that must be emitted before ``node``, inputs first.

    Args:
        node: an operator or the output.
        emitted: nodes that were emitted already.
        operators: all operator nodes; these are never free.
    """
    pending: list[tuple[fx.Node, Sequence[fx.Node], int]] = [(node, node.all_input_nodes, 0)]
    seen: set[fx.Node] = set()
    while pending:
        current, inputs, next_input = pending.pop()
        if next_input < len(inputs):
            pending.append((current, inputs, next_input + 1))
            source = inputs[next_input]
            if source not in emitted and source not in seen and source not in operators:
                seen.add(source)
                pending.append((source, source.all_input_nodes, 0))
        elif current is not node:
            yield current


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes with all that they depend on."""
    return _reachable(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes with all that depend on them."""
    return _reachable(nodes, lambda node: node.users)


def _reachable(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    reached = set(nodes)
    pending = list(reached)
    while pending:
        for neighbour in following(pending.pop()):
            if neighbour not in reached:
                reached.add(neighbour)
                pending.append(neighbour)
    return reached
