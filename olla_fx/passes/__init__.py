"""Rewrites a captured graph, with the same bits: updates in place, dead copies gone, phases apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from olla_fx import torch_compat
from olla_fx.capture import CapturedStep, Mode
from olla_fx.fx_graph import IN_BACKWARD, LAYOUTS, RECOMPUTED, REPEATED, SOURCE, Size, size_name
from olla_fx.passes.boundary import mark_boundary
from olla_fx.passes.cleanup import (
    drop_dead_copies,
    drop_identities,
    drop_output_copies,
    has_effect,
    use_scalars_directly,
)
from olla_fx.passes.dropouts import separate_masks
from olla_fx.passes.propagate import follow_storages, propagate_fake_tensors, views_in
from olla_fx.passes.reinplace import reinplace
from olla_fx.passes.reinplace_updates import reinplace_updates
from olla_fx.passes.rewrites import Wanted, rewrite
from olla_fx.rewrites import Change

__all__ = ["Rewritten", "run_passes"]

_KEPT = frozenset({"val", IN_BACKWARD, RECOMPUTED, REPEATED, SOURCE, LAYOUTS})


@dataclass(frozen=True)
class Rewritten:
    """A captured graph after all passes.

    Attributes:
        graph_module: every node has its fake value in ``meta["val"]``, which is None for a number, and of
            what else was noted of it what later stages read.
        changes: what rewrites that lower the peak have changed.
    """

    graph_module: fx.GraphModule
    changes: tuple[Change, ...] = ()


def run_passes(
    captured: CapturedStep, wanted: Wanted | None = None, *, keep_phases: bool = False
) -> Rewritten:
    """Run all passes on a copy of the captured graph.

    Args:
        captured: the step; not changed.
        wanted: rewrites to apply; None for none.
        keep_phases: True if nothing is to be written over what an earlier phase made, as the graph must be
            in which repetitions are planned (:mod:`olla_fx.passes.repetitions`).
    """
    root = captured.graph_module
    graph = _copy_of(root.graph)
    if captured.family is not None:
        numbers = captured.family.formulas(*captured.family.hints)
        for index, number in enumerate(numbers):
            setattr(root, size_name(Size(index)), number)
    views = views_in(graph)
    drop_output_copies(graph)
    use_scalars_directly(graph, captured.inputs)
    drop_identities(graph)
    # Passes decide by the numbers at the hints, and ask themselves whether they would at other sizes, too.
    with torch_compat.sizes_unguarded(node.meta.get("val") for node in graph.nodes):
        drop_dead_copies(graph, captured.outputs.results if captured.mode is Mode.AUTOGRAD else 0)
        reinplace_updates(graph)
    graph.eliminate_dead_code(has_effect)
    if captured.family is None:
        follow_storages(root, graph, views)
    else:
        propagate_fake_tensors(root, graph, captured.inputs, captured.device)
        views = views_in(graph)
    if captured.device.type == "cpu":
        separate_masks(graph)
    changes = () if wanted is None else rewrite(graph, wanted)
    if changes:
        graph.eliminate_dead_code(has_effect)
        views |= views_in(graph)
        follow_storages(root, graph, views)
    if captured.mode is Mode.AUTOGRAD and mark_boundary(graph, captured.inputs, captured.outputs.results):
        follow_storages(root, graph, views)
    reinplace(graph, keep_phases=keep_phases)
    follow_storages(root, graph, views)
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key in _KEPT}
        if isinstance(node.meta.get("val"), torch_compat.SYMBOLIC):
            # Only that it is no tensor matters, and symbols hold all others of their trace.
            node.meta["val"] = None
    return Rewritten(torch_compat.lazy_graph_module(root, graph), changes)


def _copy_of(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    results = copy.graph_copy(graph, {})
    copy.output(results)
    return copy
