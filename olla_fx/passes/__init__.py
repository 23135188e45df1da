"""Graph → graph: updates in place, dead copies gone, bookkeeping nodes removed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from olla_fx.capture import CapturedStep, Mode
from olla_fx.passes.boundary import mark_hand_over
from olla_fx.passes.cleanup import (
    drop_dead_copies,
    drop_identities,
    drop_output_copies,
    use_scalars_directly,
)
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_fx.passes.reinplace import restore_in_place
from olla_fx.passes.reinplace_updates import InPlaceReport, in_place_form, update_in_place

__all__ = [
    "InPlaceReport",
    "RewriteReport",
    "drop_dead_copies",
    "drop_identities",
    "drop_output_copies",
    "in_place_form",
    "mark_hand_over",
    "propagate_fake_tensors",
    "restore_in_place",
    "rewrite",
    "update_in_place",
    "use_scalars_directly",
]


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """What :func:`rewrite` did.

    Attributes:
        dead_copies: clones dropped.
        updates: which static arrays are updated in place.
        restored: operators that write over their first argument again, as they do in eager.
    """

    dead_copies: int
    updates: InPlaceReport
    restored: int


def rewrite(captured: CapturedStep) -> tuple[fx.GraphModule, RewriteReport]:
    """Run all rewrites on a copy of the captured graph.

    Returns:
        The rewritten graph, every node with its fake value, and what was done.
    """
    graph_module = fx.GraphModule(captured.graph_module, _copy_of(captured.graph_module.graph))
    graph = graph_module.graph
    drop_output_copies(graph)
    use_scalars_directly(graph, captured.inputs)
    drop_identities(graph)
    dead_copies = drop_dead_copies(graph)
    updates = update_in_place(graph)
    graph.eliminate_dead_code(_has_effect)
    if captured.mode is Mode.AUTOGRAD:
        mark_hand_over(graph, captured.inputs, captured.outputs.results)
    graph_module.recompile()
    propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    restored = restore_in_place(graph)
    graph_module.recompile()
    propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    return graph_module, RewriteReport(dead_copies, updates, restored)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node must stay although nothing reads it: those that write to their arguments do."""
    mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return bool(mutable) or node.is_impure()


def _copy_of(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    results = copy.graph_copy(graph, {})
    copy.output(results)
    return copy
