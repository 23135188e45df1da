"""Writes a plan out as graphs of the step in planned order, and generated functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
        functions: for each phase, the generated function that runs it.
        placeholders_read: for each phase, the indices of the placeholders that it reads, other than in
            recomputations, which read what is there, as eager's do.
        write: writes the graphs of all phases, ``plan`` in their comments.
        numbers: attributes of the graphs that are others here, where sizes of the inputs vary.
    """

    functions: tuple[Callable[..., Any], ...]
    placeholders_read: tuple[frozenset[int], ...]
    write: partial[tuple[fx.GraphModule, ...]]
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def phases(self) -> tuple[fx.GraphModule, ...]:
        """The graph of each phase, written anew when it is first asked for.

        Functions alone run a step, and a graph takes several times their memory.
        """
        return self.write()

    def with_numbers(self, numbers: Mapping[str, Any]) -> EmittedStep:
        """Return the same code for other sizes of the inputs.

        Args:
            numbers: attributes of the graphs.
        """
        functions = tuple(with_attributes(function, numbers) for function in self.functions)
        return replace(self, functions=functions, numbers=numbers)

    def with_offsets(self, plan: MemoryPlan) -> EmittedStep:
        """Return the same code, whose graphs tell other offsets.

        Args:
            plan: in the same order.
        """
        return replace(self, write=partial(self.write, plan=plan))


def emit(
    dataflow: Dataflow,
    problem: Problem,
    plan: MemoryPlan,
    inputs: Sequence[StepInput],
    begin_operator: Callable[[int], object] | None = None,
) -> EmittedStep:
    """Write a plan out as graphs and functions; see :func:`olla_fx.emit.graph.reordered_graphs`."""
    write = partial(
        reordered_graphs, dataflow, problem, plan=plan, inputs=inputs, begin_operator=begin_operator
    )
    phases = write()
    return EmittedStep(
        tuple(generated_function(phase.graph, dataflow.graph_module) for phase in phases),
        tuple(_placeholders_read(phase) for phase in phases),
        write,
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
