"""Computes which bytes of which storage a node's value covers, and if two nodes share one.

``gates.chunk(3, 1)`` gives three views of one storage that share no element, so that the first may be
overwritten while the others are still to be read. Two views are disjoint if, without the dimensions whose
strides are multiples of a common row length, they lie in different columns of that row. Where sizes vary,
that must follow from what does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import fx

from olla_fx.fx_graph import LAYOUTS, Layout, Size, is_free
from olla_fx.torch_compat import pytree, storage_key


@dataclass(frozen=True, slots=True)
class Region:
    """The elements that a strided tensor covers, in bytes.

    Attributes:
        storage: the same number for all regions of one storage.
        offset_bytes: of the first element.
        extents: size and stride in bytes of every dimension with more than one element, and of the
            bytes of one element.
        varying: the numbers that vary, in elements: dimension (0 for the offset), 0 for its size and 1 for
            its stride, and the number.
    """

    storage: int
    offset_bytes: int
    extents: tuple[tuple[int, int], ...]
    varying: tuple[tuple[int, int, Size], ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, layout: Layout | None = None) -> Region:
        """Return the region of a tensor that is not empty, with the given layout if sizes vary."""
        item = tensor.element_size()
        pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
        extents = tuple((size, stride * item) for size, stride in pairs if size != 1)
        varying: list[tuple[int, int, Size]] = []
        if layout is not None:
            formulas = [
                pair
                for pair, (size, _) in zip(zip(layout.shape, layout.stride, strict=True), pairs, strict=True)
                if size != 1
            ]
            numbers = [(0, 0, layout.offset)]
            numbers += [
                (1 + index, kind, pair[kind]) for index, pair in enumerate(formulas) for kind in (0, 1)
            ]
            varying = [number for number in numbers if isinstance(number[2], Size)]
        return cls(
            storage_key(tensor), int(tensor.storage_offset()) * item, ((item, 1), *extents), tuple(varying)
        )

    def _holds_in_rows(self, row_bytes: int) -> bool:
        """Return True if the columns in rows of a length are the same at all sizes.

        The offset and the strides that vary must be multiples of it, and sizes vary in such dimensions only.
        """
        item = self.extents[0][0]
        for index, kind, size in self.varying:
            is_multiple = size.divisor * item % row_bytes == 0
            if kind == 0 and index > 0:
                strides = [other for at, of, other in self.varying if (at, of) == (index, 1)]
                is_multiple = bool(strides) or self.extents[index][1] % row_bytes == 0
            if not is_multiple:
                return False
        return True

    def columns(self, row_bytes: int) -> tuple[int, int] | None:
        """Return the half-open interval of columns in rows of a length; None if it crosses a row's end."""
        if not self._holds_in_rows(row_bytes):
            return None
        width = 1 + sum((size - 1) * stride for size, stride in self.extents if stride % row_bytes)
        start = self.offset_bytes % row_bytes
        return (start, start + width) if start + width <= row_bytes else None

    def overlaps(self, other: Region) -> bool:
        """Return True if the two may have a byte in common; False only if they surely have none."""
        if self.storage != other.storage:
            return False
        if (self.offset_bytes, self.extents) == (other.offset_bytes, other.extents):
            return True
        if not self.varying and not other.varying and self._lies_apart_from(other):
            return False
        rows = {
            stride
            for region in (self, other)
            for index, (_, stride) in enumerate(region.extents)
            if stride > 1 and not any((at, kind) == (index, 1) for at, kind, _ in region.varying)
        }
        for row_bytes in sorted(rows):
            left, right = self.columns(row_bytes), other.columns(row_bytes)
            if left and right and (left[1] <= right[0] or right[1] <= left[0]):
                return False
        return True

    def _lies_apart_from(self, other: Region) -> bool:
        """Return True if one of the two begins behind the other's last byte."""
        first, second = (self, other) if self.offset_bytes <= other.offset_bytes else (other, self)
        last_bytes = first.offset_bytes + sum((size - 1) * stride for size, stride in first.extents)
        return last_bytes < second.offset_bytes


def has_known_elements(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if a node's value is a tensor of fixed size that is not empty."""
    return isinstance(value, torch.Tensor) and type(value.numel()) is int and value.numel() > 0


class Regions:
    """The regions of a graph's nodes and their readers, kept up to date as results move into arguments."""

    def __init__(self, graph: fx.Graph) -> None:
        """Read them off the fake values of a propagated graph."""
        self._moved: dict[int, tuple[int, int, tuple[tuple[int, int, Size], ...]]] = {}
        self._known: dict[fx.Node, tuple[object, list[Region]]] = {}
        self._nodes: dict[int, dict[Region, list[fx.Node]]] = {}
        self._operators: dict[fx.Node, bool] = {}
        self._kept: set[int] = set()
        self.position: dict[fx.Node, int] = {}
        for index, node in enumerate(graph.nodes):
            self._note(node, index)
            if node.op in ("placeholder", "get_attr"):
                self._kept.update(region.storage for region in self.of(node))
        self.keep(graph.output_node().all_input_nodes)

    def _note(self, node: fx.Node, position: int) -> None:
        self.position[node] = position
        for region in self.of(node):
            self._nodes.setdefault(region.storage, {}).setdefault(region, []).append(node)

    def of(self, node: fx.Node) -> list[Region]:
        """Return the regions of a node's tensors, each in its present storage.

        Empty tensors have none, nor have those of unknown size, which the dataflow refuses.
        """
        value = node.meta.get("val")
        known, regions = self._known.get(node, (None, []))
        is_known = known is value and value is not None
        if not is_known:
            regions = _regions_of(node)
        if not is_known or any(region.storage in self._moved for region in regions):
            regions = [self._present(region) for region in regions]
            self._known[node] = value, regions
        return regions

    def _present(self, region: Region) -> Region:
        while region.storage in self._moved:
            storage, shift_bytes, varying = self._moved[region.storage]
            offset_bytes = region.offset_bytes + shift_bytes
            region = replace(
                region, storage=storage, offset_bytes=offset_bytes, varying=(*region.varying, *varying)
            )
        return region

    def keep(self, nodes: Iterable[fx.Node]) -> None:
        """Let nothing be written over the storages of some nodes."""
        self._kept.update(region.storage for node in nodes for region in self.of(node))

    def is_kept(self, node: fx.Node) -> bool:
        """Return True if a node lies in a storage of the caller's, in one that is returned or to be kept."""
        return any(region.storage in self._kept for region in self.of(node))

    def readers(self, region: Region) -> set[fx.Node]:
        """Return the operators that read or write a byte of a region, through any view of it."""
        return {
            user
            for part, nodes in self._nodes.get(region.storage, {}).items()
            if part.overlaps(region)
            for node in nodes
            for user in node.users
            if self._is_operator(user)
        }

    def _is_operator(self, node: fx.Node) -> bool:
        known = self._operators.get(node)
        if known is None:
            known = self._operators[node] = not is_free(node)
        return known

    def move(self, node: fx.Node, target: fx.Node) -> None:
        """Note that a node's one tensor now lies where ``target``'s does; both have the same strides."""
        (source,), (place,) = self.of(node), self.of(target)
        varying = tuple(number for region in (source, place) for number in region.varying if number[0] == 0)
        self._moved[source.storage] = place.storage, place.offset_bytes - source.offset_bytes, varying
        there = self._nodes.setdefault(place.storage, {})
        for region, nodes in self._nodes.pop(source.storage).items():
            there.setdefault(self._present(region), []).extend(nodes)

    def add(self, node: fx.Node, value: torch.Tensor, position: int) -> None:
        """Note a node with a value that others, its views, may share already."""
        for region in self.of(node):
            self._nodes[region.storage][region].remove(node)
        node.meta["val"] = value
        self._note(node, position)


def _regions_of(node: fx.Node) -> list[Region]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    layouts = node.meta.get(LAYOUTS) or [None] * len(leaves)
    return [
        Region.of(leaf, layout)
        for leaf, layout in zip(leaves, layouts, strict=False)
        if has_known_elements(leaf)
    ]
