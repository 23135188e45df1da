"""Rewrites a captured graph, with the same bits: updates in place, dead copies gone, phases apart."""

from __future__ import annotations

from torch import fx

from olla_fx import operators
from olla_fx.capture import CapturedStep, Mode
from olla_fx.fx_graph import Size, size_name
from olla_fx.passes.boundary import mark_boundary
from olla_fx.passes.cleanup import (
    drop_dead_copies,
    drop_identities,
    drop_output_copies,
    split_dropout_backward,
    use_scalars_directly,
)
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_fx.passes.reinplace import reinplace
from olla_fx.passes.reinplace_updates import reinplace_updates
from olla_fx.torch_compat import OpOverload, schema_of

__all__ = ["run_passes"]


def run_passes(captured: CapturedStep) -> fx.GraphModule:
    """Run all passes on a copy of the captured graph.

    Returns:
        The new graph, every node with its fake value in ``meta["val"]``.
    """
    graph_module = fx.GraphModule(captured.graph_module, _copy_of(captured.graph_module.graph))
    graph = graph_module.graph
    if captured.family is not None:
        numbers = captured.family.formulas(*captured.family.varying.hints)
        for index, number in enumerate(numbers):
            setattr(graph_module, size_name(Size(index)), number)
    drop_output_copies(graph)
    use_scalars_directly(graph, captured.inputs)
    if captured.family is not None:
        # What follows decides by numbers, those of the hints, and asks whether it would at other sizes, too.
        propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    drop_identities(graph)
    drop_dead_copies(graph, captured.outputs.results if captured.mode is Mode.AUTOGRAD else 0)
    if captured.device.type == "cpu":
        split_dropout_backward(graph)
    reinplace_updates(graph)
    graph.eliminate_dead_code(_has_effect)
    graph_module.recompile()
    propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    if captured.mode is Mode.AUTOGRAD and mark_boundary(graph, captured.inputs, captured.outputs.results):
        graph_module.recompile()
        propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    reinplace(graph)
    graph_module.recompile()
    propagate_fake_tensors(graph_module, captured.inputs, captured.device)
    return graph_module


def _has_effect(node: fx.Node) -> bool:
    """Return True if a node must stay even if nothing reads it, as one that writes to its arguments."""
    if node.target is operators.random_state:
        return False
    is_operator = isinstance(node.target, OpOverload)
    return (is_operator and schema_of(node.target).is_mutable) or node.is_impure()


def _copy_of(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    results = copy.graph_copy(graph, {})
    copy.output(results)
    return copy
