"""Which operators take the same time: those of one kind, by operator, layouts of tensors and constants.

A kind can be measured on its own, on numbers of our own, if its time does not hang on them and it changes
nothing but its results and the tensors that it is given: an operator of ATen's or ours, no random draw, and
no integers among its tensors unless it is known what they mean.
"""

from __future__ import annotations

import collections
import hashlib
import math
from typing import Any

import torch
from torch import fx

from olla_fx.draws import AGAIN, FROM_STATE
from olla_fx.fx_graph import (
    draws_random_numbers,
    given_arguments,
    is_on,
    may_raise,
    written_arguments,
)
from olla_fx.link import is_transfer
from olla_fx.torch_compat import OpOverload, plain_name, pytree

_LATE_NUMBER = -0.5
"""In the place of a number that is known in a call alone, such as ``-lr``."""

_NUMBER_TYPES = ("number", "float", "Optional[number]", "Optional[float]")

_TILE = 1 << 16
"""So many random numbers are drawn; they are repeated to fill a tensor."""

_OWN_NAMESPACES = ("aten", "olla_fx")
"""Nobody knows what operators of others do besides: communicate, count."""

_INDEXING = frozenset(
    {
        "embedding", "embedding_dense_backward", "embedding_rows_backward", "embedding_update",
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "gather",
        "index_select", "index", "_unsafe_index", "scatter", "scatter_add", "index_add", "index_copy",
        "index_put", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
        "max_pool2d_with_indices_backward_by_shape", "max_pool3d_with_indices_backward_by_shape",
    }
)  # fmt: skip
"""Operators whose integers are positions: if smaller than every extent, they are in range everywhere."""

_ANY_INTEGERS = frozenset(
    {
        "add", "sub", "mul", "where", "eq", "ne", "lt", "le", "gt", "ge", "copy", "clone", "_to_copy", "cat",
        "stack", "fill", "zero", "sum", "masked_fill", "tril", "triu", "cumsum", "argmax", "max", "min",
        "neg", "ones_like", "zeros_like", "full_like", "logical_and", "logical_or", "logical_not",
        "bitwise_and", "bitwise_or", "bitwise_not",
    }
)  # fmt: skip
"""Operators that compute with any integers."""

_VALUES_MATTER = frozenset({"nonzero_sized"})
"""Operators that refuse truth values other than those that they were captured for."""


def operator_name(node: fx.Node) -> str:
    """Return the name of an operator, the same in place and drawn again; another in groups."""
    name = plain_name(node.target).removesuffix(AGAIN).removesuffix("_")
    return f"{name} in groups" if name.startswith("convolution") and _groups(node) > 1 else name


def _groups(node: fx.Node) -> int:
    return next((int(given) for argument, given in given_arguments(node) if argument.name == "groups"), 1)


def kind_of(node: fx.Node) -> str:
    """Return a digest of all that the time of an operator depends on, its device aside.

    Where its results lie is no part of it: in place, in memory that is given, or in memory of its own. Nor is
    the state from which random numbers are drawn again.
    """
    if isinstance(node.target, OpOverload):
        name = operator_name(node)
        given = [
            (argument.name, _described(value))
            for argument, value in given_arguments(node)
            if not argument.is_out and argument.name not in FROM_STATE
        ]
    else:
        name, given = str(node.target), [("", _described([node.args, *node.kwargs.values()]))]
    results = _described(node.meta.get("val"))
    return hashlib.sha256(f"{name} {given} {results}".encode()).hexdigest()[:16]


def _described(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {tuple(argument.shape)} {argument.stride()} {argument.device.type}"
    if isinstance(argument, list | tuple):
        return str([_described(item) for item in argument])
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        # What is no tensor may be another number at each call.
        is_layout = isinstance(value, torch.Tensor | list | tuple)
        return _described(value) if is_layout else type(value).__name__
    return repr(argument)


def can_be_measured(node: fx.Node, device: torch.device) -> bool:
    """Return True if an operator can run on numbers of our own; see the module docstring."""
    operator = node.target
    if not isinstance(operator, OpOverload) or operator.namespace not in _OWN_NAMESPACES:
        return False
    name = operator_name(node)
    if is_transfer(node) or draws_random_numbers(node) or name in _VALUES_MATTER:
        return False
    if may_raise(node) and name not in _INDEXING:
        return False
    given = list(given_arguments(node))
    if any(_is_unknown(value) and str(argument.type) not in _NUMBER_TYPES for argument, value in given):
        return False
    tensors = _tensors_given(node)
    if not any(is_on(tensor, device) and tensor.numel() for tensor in (*tensors, *_tensors_of(node))):
        return False
    if any(tensor.is_complex() for tensor in tensors):
        return False
    has_integers = any(not (t.is_floating_point() or t.dtype is torch.bool) for t in tensors)
    return not has_integers or name in _INDEXING or name in _ANY_INTEGERS


def _is_unknown(given: object) -> bool:
    """Return True if an argument is, or holds, a number that is known in a call alone."""
    return any(
        isinstance(leaf, fx.Node) and leaf.meta.get("val") is None for leaf in pytree.tree_leaves(given)
    )


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _tensors_given(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in _tensors_of(source)]


def operand_bytes(node: fx.Node) -> int:
    """Return the bytes that :class:`Operands` and the results of a call take at most."""
    tensors = (*_tensors_given(node), *_tensors_of(node))
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


class Operands:
    """Makes arguments of our own in the layouts of operators'.

    Fractions are between 0 and 1, and integers below the smallest extent of any argument. Fractions lie in
    memory that is drawn once and serves one operator after the other: making memory takes longer than most
    operators. No generator of the caller's is used.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            device: whose tensors lie in memory that is used again.
        """
        self._device = device
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self._written: list[torch.Tensor] = []

    def of(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords of an operator; those of the one before are of no more use.

        Args:
            node: one that :func:`can_be_measured`. What it is given twice is one tensor.
        """
        for memory in self._written:
            # Numbers that operators write to in place would dwindle from run to run.
            _fill(memory, 1)
        self._written.clear()
        self._reserve(node)
        bound = min((size for tensor in _tensors_given(node) for size in tensor.shape if size), default=1)
        written = frozenset(written_arguments(node))
        values = {source: self._real(source, bound, source in written) for source in node.all_input_nodes}
        arguments = fx.node.map_arg(node.args, values.__getitem__)
        return arguments, dict(fx.node.map_arg(node.kwargs, values.__getitem__))

    def _real(self, source: fx.Node, bound: int, is_written: bool) -> Any:
        value = source.meta.get("val")
        if value is None:
            return _LATE_NUMBER
        return pytree.tree_map_only(torch.Tensor, lambda fake: self._filled(fake, bound, is_written), value)

    def _filled(self, fake: torch.Tensor, bound: int, is_written: bool) -> torch.Tensor:
        count = _extent(fake)
        if self._is_kept(fake):
            start = self._used[fake.dtype]
            self._used[fake.dtype] += _in_tiles(count)
            memory = self._memory[fake.dtype][start : start + count]
            if is_written:
                self._written.append(memory)
        else:
            memory = torch.empty(count, dtype=fake.dtype, device=fake.device)
            _fill(memory, bound)
        return memory.as_strided(fake.shape, fake.stride())

    def _is_kept(self, fake: torch.Tensor) -> bool:
        return fake.dtype.is_floating_point and is_on(fake, self._device)

    def _reserve(self, node: fx.Node) -> None:
        """Make the memory large enough for an operator's arguments."""
        needed: collections.Counter[torch.dtype] = collections.Counter()
        for fake in filter(self._is_kept, _tensors_given(node)):
            needed[fake.dtype] += _in_tiles(_extent(fake))
        for dtype, count in needed.items():
            if dtype not in self._memory or self._memory[dtype].numel() < count:
                self._memory.pop(dtype, None)
                self._memory[dtype] = torch.empty(count, dtype=dtype, device=self._device)
                _fill(self._memory[dtype], 1)
        self._used = dict.fromkeys(needed, 0)


def _extent(fake: torch.Tensor) -> int:
    """Return the elements of memory from a tensor's first to its last."""
    pairs = zip(fake.shape, fake.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if fake.numel() else 0


def _in_tiles(count: int) -> int:
    return -(-count // _TILE) * _TILE


def _fill(memory: torch.Tensor, bound: int) -> None:
    """Fill memory with random numbers; no generator of the caller's is used."""
    generator = torch.Generator(memory.device).manual_seed(0)
    tile = torch.empty(min(memory.numel(), _TILE), dtype=memory.dtype, device=memory.device)
    if memory.dtype.is_floating_point:
        tile.uniform_(generator=generator)
    else:
        most = 2 if memory.dtype is torch.bool else min(bound, torch.iinfo(memory.dtype).max)
        tile.random_(0, most, generator=generator)
    for start in range(0, memory.numel(), _TILE):
        part = memory[start : start + _TILE]
        part.copy_(tile[: part.numel()])
