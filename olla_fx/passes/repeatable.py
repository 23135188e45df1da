"""Says which operators may run a second time in a later phase with the same bits, and what runs then.

An operator may if it computes the same from what is still there. That excludes what
writes to a tensor of the caller's, what reads something that its phase overwrites later, and on
accelerators what adds up in any sequence. Collectives and operators of other libraries are excluded, since
they may do more than their schemas say; so is what is on another device. Two kinds have a form of their own
for the second time:

* **Batch norms** that :mod:`olla_fx.normalization` can make again from the mean and deviation that backward
  keeps anyway are made so, in one pass and with the clamp behind them. Others with running statistics run
  without these, which the first run has updated. On the CPU that is the form without statistics; on CUDA,
  where their absence may choose another kernel, they write to scratch tensors, whose values a training step
  does not read.
* **Random draws** are made again from the state in which the generator was before the first run
  (:mod:`olla_fx.draws`), if what they draw is much larger than a state. In a step that is launched as a CUDA
  graph, which cannot set a state, they run once.

**Between forward and backward** the caller may change tensors. What runs again must read what forward read:
a caller's tensor that eager's backward reads, too, is as it was, or backward is refused as it is in eager.
Of another one (a bias, say) a copy is kept if it is small; if it is not, what reads it runs once.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from olla_fx import draws, masks, torch_compat
from olla_fx.draws import state_bytes
from olla_fx.fx_graph import (
    IN_BACKWARD,
    RECOMPUTED,
    REPEATED,
    base_of,
    draws_random_numbers,
    forward_backward_boundary,
    is_free,
    is_on,
    storages_of,
    written_arguments,
)
from olla_fx.normalization import Again, normalized_again
from olla_fx.passes.phases import phase_starts
from olla_fx.passes.regions import Region, Regions
from olla_fx.passes.reinplace import fits_over
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.torch_compat import pytree

aten = torch.ops.aten

SMALL_BYTES = 64 * 1024
"""Of a tensor of the caller's that is as large, a copy may be kept for backward."""

LEAST_STATES = 16
"""What is drawn again takes as much room as so many states of the generator, of which one is kept for it."""

_ADD_IN_ANY_SEQUENCE = {
    aten._adaptive_avg_pool2d_backward,
    aten._embedding_bag_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten.adaptive_max_pool2d_backward,
    aten.avg_pool3d_backward,
    aten.bincount,
    aten.convolution_backward,
    aten.cumsum,
    aten.embedding_dense_backward,
    aten.fractional_max_pool2d_backward,
    aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward,
    aten.histc,
    aten.index_add,
    aten.index_add_,
    aten.index_put,
    aten.index_put_,
    aten.index_reduce,
    aten.max_pool2d_with_indices_backward,
    aten.max_pool3d_with_indices_backward,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.replication_pad1d_backward,
    aten.replication_pad2d_backward,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
    aten.upsample_bicubic2d_backward,
    aten.upsample_bilinear2d_backward,
    aten.upsample_linear1d_backward,
    aten.upsample_trilinear3d_backward,
}
"""Operators of which an accelerator's kernels may sum up in another sequence each time."""

_NAMESPACES = frozenset({"aten", "mkldnn", "olla_fx", "torchvision"})

RUNNING_MEAN, _IS_TRAINING = 3, 5

DRAWN_AGAIN = {
    **draws.DRAWN_AGAIN,
    masks.packed_dropout_mask: masks.packed_dropout_mask_drawn_again,
}
"""Operators that draw, each with the one that draws again from a state."""


class Repeatable:
    """What of a graph may run again.

    Attributes:
        backward: where backward begins; None if the graph has none.
        position: of each node in the graph.
    """

    def __init__(self, graph: fx.Graph, device: torch.device, probe: Probe | None) -> None:
        """Read who reads and writes what off a graph's fake values.

        Args:
            graph: after all passes, with ``keep_phases``.
            device: the one that is planned.
            probe: says whether kernels give equal bits; None if none may be used that need this.
        """
        self._again = {} if probe is None else _made_from_statistics(graph, probe)
        # Asked here, as there may be a fake mode on later.
        self._unequal = set() if probe is None else _unequal_without_statistics(graph, probe, self._again)
        self._starts = phase_starts(graph)
        self.backward = self._starts[0] if self._starts else None
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._device = device
        self._sets_states = probe is None or probe.sets_states
        self._regions = Regions(graph)
        self._writers: dict[int, list[tuple[fx.Node, Region]]] = {}
        self._static: set[int] = set()
        self._callers: set[int] = set()
        self._outputs: set[int | None] = set()
        self._safe: set[int | None] = set()
        for node in graph.nodes:
            for target in written_arguments(node):
                for region in self._regions.of(target):
                    self._writers.setdefault(region.storage, []).append((node, region))
            if node.op in ("placeholder", "get_attr"):
                self._static.update(region.storage for region in self._regions.of(node))
        if self.backward is not None and self.backward.target is forward_backward_boundary:
            self._note_callers(graph, self.backward)

    def _note_callers(self, graph: fx.Graph, boundary: fx.Node) -> None:
        """Note what the caller holds between the phases, and what of that eager's backward reads."""
        for node in graph.find_nodes(op="placeholder"):
            self._callers.update(region.storage for region in self._regions.of(node))
        for output in pytree.tree_leaves(boundary.args[0]):
            self._outputs.update(storages_of(output.meta["val"]) if isinstance(output, fx.Node) else ())
        for node in graph.nodes:
            is_original = node.meta.get(IN_BACKWARD) and not node.meta.get(RECOMPUTED)
            if is_original and self.position[node] > self.position[boundary] and not is_free(node):
                for source in node.all_input_nodes:
                    self._safe.update(storages_of(source.meta.get("val")))

    def phase(self, node: fx.Node) -> int:
        """Return the phase in which a node stands: 0 for forward, 1 for backward, and so on."""
        return sum(self.position[node] >= self.position[start] for start in self._starts)

    def may_run_again(self, node: fx.Node) -> bool:
        """Return True if an operator may run again in a later phase, but for who overwrites what it reads."""
        target = node.target
        if self.phase(node) == len(self._starts) or node.meta.get(REPEATED) or node.meta.get(RECOMPUTED):
            return False
        if not isinstance(target, torch_compat.OpOverload) or target.namespace not in _NAMESPACES:
            return False
        if draws_random_numbers(node) and not self._may_draw_again(node):
            return False
        if self._device.type != "cpu" and target.overloadpacket in _ADD_IN_ANY_SEQUENCE:
            return False
        if not self._is_planned(node) or not _makes_or_writes(node) or node in self._unequal:
            return False
        return self._own(node).isdisjoint(self._static) and all(map(self._stays, self.sources(node)))

    def _may_draw_again(self, node: fx.Node) -> bool:
        """Return True if a draw can be repeated, and takes more room than the generator's state."""
        drawn = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
        drawn_bytes = sum(leaf.numel() * leaf.element_size() for leaf in drawn)
        is_larger = drawn_bytes >= LEAST_STATES * state_bytes(self._device)
        return self._sets_states and is_larger and node.target in DRAWN_AGAIN

    def from_statistics(self, node: fx.Node) -> Again | None:
        """Return what makes a batch norm's result again from its statistics; None for others."""
        return self._again.get(node)

    def clamps_what_it_makes(self, node: fx.Node, activation: fx.Node) -> bool:
        """Return True if a batch norm's repetition can do what a writer over its result does, too."""
        return self.from_statistics(node) is not None and normalized_again(node, activation) is not None

    def makes_first_alone(self, node: fx.Node) -> bool:
        """Return True if an operator's repetition makes its first result alone, of the others."""
        return self.from_statistics(node) is not None

    def _is_planned(self, node: fx.Node) -> bool:
        """Return True if an operator reads and makes nothing on other devices."""
        values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        return all(is_on(leaf, self._device) for leaf in leaves)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of which an operator's repetition reads the elements."""
        again = self.from_statistics(node)
        if again is not None:
            return [argument for argument in again.args if isinstance(argument, fx.Node)]
        if has_statistics(node):
            return [argument for argument in node.args[:RUNNING_MEAN] if isinstance(argument, fx.Node)]
        return node.all_input_nodes

    def _own(self, node: fx.Node) -> set[int]:
        """Return the storages that an operator's repetition writes to, beside its results."""
        written = [] if has_statistics(node) else written_arguments(node)
        return {region.storage for argument in written for region in self._regions.of(argument)}

    def _stays(self, source: fx.Node) -> bool:
        """Return True if the caller does not change what is read before backward, unnoticed."""
        for region in self._regions.of(source):
            if region.storage in self._safe:
                continue
            if region.storage in self._outputs:
                return False
            if region.storage in self._callers and not _is_kept_by_copy(base_of(source)):
                return False
        return True

    def is_read_from_copy(self, placeholder: fx.Node) -> bool:
        """Return True if repetitions are to read a copy of a tensor of the caller's that forward makes."""
        return any(self._is_copied(region) for region in self._regions.of(placeholder))

    def _is_copied(self, region: Region) -> bool:
        return region.storage in self._callers and region.storage not in self._safe

    def later_writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the operators that overwrite, behind an operator, what its repetition would read.

        Not those of the array that it writes to itself, which are repeated with it, and not those after
        forward of what is read from a copy.
        """
        own = self._own(node)
        return list(
            dict.fromkeys(
                writer
                for source in self.sources(node)
                for region in self._regions.of(source)
                if region.storage not in own
                for writer, written in self._writers.get(region.storage, ())
                if self.position[writer] > self.position[node] and written.overlaps(region)
                if not (self._is_copied(region) and self.phase(writer))
            )
        )

    def fits_over(self, node: fx.Node, target: fx.Node) -> bool:
        """Return True if an operator's result could be written over an argument that nobody else needs."""
        return fits_over(node, target, self._regions)


def _made_from_statistics(graph: fx.Graph, probe: Probe) -> dict[fx.Node, Again]:
    """Return for batch norms what makes their results again with the same bits."""
    again = {node: normalized_again(node) for node in graph.nodes}
    return {
        node: what
        for node, what in again.items()
        if what is not None and probe.equal_from_statistics(what.source)
    }


def _unequal_without_statistics(graph: fx.Graph, probe: Probe, others: Collection[fx.Node]) -> set[fx.Node]:
    """Return the batch norms whose results have other bits if no running statistics are updated."""
    target = aten._native_batch_norm_legit.default
    norms = [node for node in graph.find_nodes(op="call_function", target=target) if has_statistics(node)]
    return {
        norm
        for norm in norms
        if norm not in others and not probe.equal_without_statistics(norm.all_input_nodes[0].meta["val"])
    }


def _makes_or_writes(node: fx.Node) -> bool:
    """Return False if an operator both makes something and returns arguments that it has written to."""
    read = {key for source in node.all_input_nodes for key in storages_of(source.meta.get("val"))} - {None}
    results = set(storages_of(node.meta.get("val"))) - {None}
    return read.isdisjoint(results) or results <= read


def _is_kept_by_copy(base: fx.Node) -> bool:
    """Return True if a node is a small tensor of the caller's, and a clone of it lies in memory alike."""
    if base.op != "placeholder":
        return False
    value = base.meta["val"]
    size_bytes = value.numel() * value.element_size()
    dense = bool(value.is_contiguous()) and value.untyped_storage().nbytes() == size_bytes
    return dense and size_bytes <= SMALL_BYTES


def has_statistics(node: fx.Node) -> bool:
    """Return True for a batch norm that updates running statistics."""
    if node.target is aten._native_batch_norm_legit.default:
        return node.args[_IS_TRAINING] is True
    return node.target is aten._batch_norm_with_update.default
