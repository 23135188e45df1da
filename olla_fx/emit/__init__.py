"""Writes a plan out as graphs of the step in planned order, and generated functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from olla_fx.capture import StepInput
from olla_fx.dataflow import Dataflow
from olla_fx.emit.codegen import generated_function, with_attributes
from olla_fx.emit.graph import reordered_graphs
from olla_fx.fx_graph import RECOMPUTED, storages_of
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem

__all__ = ["EmittedStep", "emit"]


@dataclass(frozen=True)
class EmittedStep:
    """A step in planned order, phase by phase: one phase, or forward and backward in the caller's own loop.

    Attributes:
        phases: the graph of each phase.
        functions: for each phase, the generated function that runs it.
        placeholders_read: for each phase, the indices of the placeholders that it reads, other than in
            recomputations, which read what is there, as eager's do.
        numbers: attributes of the graph modules that are others here, where sizes of the inputs vary.
    """

    phases: tuple[fx.GraphModule, ...]
    functions: tuple[Callable[..., Any], ...]
    placeholders_read: tuple[frozenset[int], ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def with_numbers(self, numbers: Mapping[str, Any]) -> EmittedStep:
        """Return the same code for other sizes of the inputs.

        Args:
            numbers: attributes of the graph modules.
        """
        functions = tuple(
            with_attributes(function, phase, numbers)
            for function, phase in zip(self.functions, self.phases, strict=True)
        )
        return EmittedStep(self.phases, functions, self.placeholders_read, numbers)


def emit(
    dataflow: Dataflow,
    problem: Problem,
    plan: MemoryPlan,
    inputs: Sequence[StepInput],
    begin_operator: Callable[[int], object] | None = None,
) -> EmittedStep:
    """Write a plan out as graphs and functions; see :func:`olla_fx.emit.graph.reordered_graphs`."""
    phases = reordered_graphs(dataflow, problem, plan, inputs, begin_operator)
    return EmittedStep(
        phases,
        tuple(generated_function(phase) for phase in phases),
        tuple(_placeholders_read(phase) for phase in phases),
    )


def _placeholders_read(phase: fx.GraphModule) -> frozenset[int]:
    readers = [node for node in phase.graph.nodes if "operator" in node.meta or node.op == "output"]
    read = {
        key
        for reader in readers
        if not reader.meta.get(RECOMPUTED)
        for source in reader.all_input_nodes
        for key in storages_of(source.meta.get("val"))
    }
    return frozenset(
        position
        for position, node in enumerate(phase.graph.find_nodes(op="placeholder"))
        if not read.isdisjoint(set(storages_of(node.meta.get("val"))) - {None})
    )
