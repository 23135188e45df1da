"""Writes a plan out as graphs of the step in planned order, and functions that run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from torch import fx

from olla_fx import torch_compat
from olla_fx.arena import NativeModule
from olla_fx.capture import Role, StepInput
from olla_fx.dataflow import Dataflow
from olla_fx.emit.codegen import GeneratedFunction, generated_function
from olla_fx.emit.graph import reordered_graphs
from olla_fx.emit.program import NativeFunction, native_functions
from olla_fx.fx_graph import RECOMPUTED, storages_of, written_arguments
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem

__all__ = ["EmittedStep", "Handover", "emit"]


@dataclass(frozen=True)
class Handover:
    """What the backward of a step in two phases reads that exists before it.

    Attributes:
        placeholders_read: indices of the placeholders that it reads, other than in recomputations, which read
            what is there, as eager's do.
        outputs_kept: positions of the outputs that lie in the memory of what forward keeps for it.
        kept_written: positions among what forward keeps of the values that it may write to.
    """

    placeholders_read: tuple[int, ...] = ()
    outputs_kept: tuple[int, ...] = ()
    kept_written: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EmittedStep:
    """A step in planned order, phase by phase: one phase, or forward and backward in the caller's own loop.

    Attributes:
        functions: for each phase, what runs it: a native program, or a generated function where there is no
            compiler.
        handover: what backward reads beside its own results, if it is a phase of its own.
        write: writes the graphs of all phases, ``plan`` in their comments.
        native: the native module of the device, if there is one.
        numbers: attributes of the graphs that are others here, where sizes of the inputs vary.
    """

    functions: tuple[NativeFunction | GeneratedFunction, ...]
    handover: Handover
    write: partial[tuple[fx.GraphModule, ...]]
    native: NativeModule | None = None
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
        functions = tuple(function.with_attributes(numbers) for function in self.functions)
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
    native: NativeModule | None = None,
    *,
    in_buffer: bool = False,
) -> EmittedStep:
    """Write a plan out as graphs and functions.

    Args:
        dataflow: as of :func:`olla_fx.emit.graph.reordered_graphs`.
        problem: likewise.
        plan: likewise.
        inputs: likewise.
        native: the device's native module; None if there is none.
        in_buffer: True if it is to serve the step's requests.
    """
    begin_operator = native.begin_operator if native is not None and in_buffer else None
    write = partial(
        reordered_graphs, dataflow, problem, plan=plan, inputs=inputs, begin_operator=begin_operator
    )
    phases = write()
    constants = dataflow.graph_module
    functions: tuple[NativeFunction | GeneratedFunction, ...]
    if native is None:
        functions = tuple(generated_function(phase.graph, constants) for phase in phases)
    else:
        functions = native_functions(phases, constants, native, begin_operator)
    return EmittedStep(functions, _handover(phases, inputs), write, native)


def _handover(phases: Sequence[fx.GraphModule], inputs: Sequence[StepInput]) -> Handover:
    """Read off the graphs what backward reads beside its own results."""
    if len(phases) == 1:
        return Handover()
    forward, backward = (phase.graph for phase in phases)
    outputs, kept = cast(tuple[Sequence[Any], Sequence[Any]], forward.output_node().args[0])
    kept_storages = [_storages([value]) for value in kept]
    all_kept = set().union(*kept_storages)
    written: set[int] = set()
    read: set[int] = set()
    for node in backward.nodes:
        written |= _storages(_may_write(node))
        if "operator" in node.meta and not node.meta.get(RECOMPUTED):
            read |= _storages(node.all_input_nodes)
    return Handover(
        tuple(
            position
            for position, (node, step_input) in enumerate(
                zip(backward.find_nodes(op="placeholder"), inputs, strict=False)
            )
            if step_input.role is not Role.TANGENT and not read.isdisjoint(_storages([node]))
        ),
        tuple(
            position
            for position, output in enumerate(outputs)
            if not all_kept.isdisjoint(_storages([output]))
        ),
        frozenset(
            position for position, storages in enumerate(kept_storages) if not written.isdisjoint(storages)
        ),
    )


def _may_write(node: fx.Node) -> list[fx.Node]:
    """Return the values that a call may write to: a function written in Python may write to all."""
    if isinstance(node.target, torch_compat.OpOverload):
        return written_arguments(node)
    return node.all_input_nodes if "operator" in node.meta else []


def _storages(values: Iterable[object]) -> set[int]:
    nodes = [value for value in values if isinstance(value, fx.Node)]
    return {key for node in nodes for key in storages_of(node.meta.get("val")) if key is not None}
