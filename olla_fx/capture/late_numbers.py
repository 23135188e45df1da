"""Binds numbers of the user's late: they become inputs of the graph when they are seen to change.

While the step is traced a symbolic number stands in the place of each, in the copies of model and loss or,
where functions read it, in the very variable (it behaves as the number does, so other threads may read it).
What code does with a symbolic number may differ from what it does with Python's: ``isinstance(number,
float)`` is false. So the graph is kept only if it equals one that was captured with constants, for other
values of the numbers, when these are filled in. A number that also reaches the graph in another way is
found out by that, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.types import CapturedStep, LateRequest, OutputAlias, StepRequest
from olla_fx.errors import NumberNotLateError
from olla_fx.guards import LateBinding, NumberSlot, Role, StepInput
from olla_fx.guards.numbers import root_in
from olla_fx.torch_compat import LateNumbers, OpOverload, pytree


class LateTracing:
    """The late-bound numbers of one tracing run; does nothing if the request has none."""

    def __init__(self, request: StepRequest, model_copy: ModelCopy, fake_mode: Any) -> None:
        """Find the numbers in the copies that are traced.

        Args:
            request: what is traced.
            model_copy: the copies.
            fake_mode: of the arguments.
        """
        self._slots: tuple[NumberSlot, ...] = () if request.late is None else request.late.slots
        self._values = [slot.read() for slot in self._slots]
        self._fake_mode = fake_mode
        self._numbers = LateNumbers(fake_mode.shape_env)
        copies = {id(module): model_copy.modules[name] for name, module in request.modules().items()}
        self._roots = [
            root_in(slot.root, copies, request.loss_fn, model_copy.loss_fn) for slot in self._slots
        ]

    def add_inputs(self, inputs: list[StepInput], arguments: list[torch.Tensor]) -> None:
        """Add a placeholder for each number, and its argument."""
        for slot, value in zip(self._slots, self._values, strict=True):
            with self._fake_mode:
                dtype = torch.float64 if type(value) is float else torch.int64
                arguments.append(torch.empty((), dtype=dtype))
            inputs.append(StepInput(Role.NUMBER, slot.name, None, number=value))

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Trace within this; an error is one of the numbers'."""
        if not self._slots:
            yield
            return
        try:
            with self._numbers.traced():
                yield
        except Exception as error:
            raise NumberNotLateError(self._pinned_names(), str(error)) from error

    @contextlib.contextmanager
    def in_place(
        self, inputs: Sequence[StepInput], flat: Sequence[torch.Tensor], arguments: Sequence[Any]
    ) -> Iterator[None]:
        """Let symbolic numbers stand in the places of the user's.

        Args:
            inputs: of the step.
            flat: its tensors.
            arguments: the fake tensors behind these.
        """
        if not self._slots:
            yield
            return
        indices = [index for index, item in enumerate(inputs) if item.role is Role.NUMBER]
        symbols: list[Any] = []
        for position, (index, value) in enumerate(zip(indices, self._values, strict=True)):
            self._numbers.put_into(arguments[index], self._numbers.new(position, value))
            symbols.append(flat[index].item())
        places = list(zip(self._slots, self._roots, symbols, self._values, strict=True))
        try:
            for slot, root, symbol, _ in places:
                slot.write(symbol, root)
            yield
        finally:
            for slot, root, symbol, value in places:
                if slot.read(root) is symbol:  # else the step has assigned to it, which is refused
                    slot.write(value, root)

    def finish(self, graph_module: fx.GraphModule) -> None:
        """Refuse numbers that the graph holds for some values of only."""
        if not self._slots:
            return
        values = [
            leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))
        ]
        self._numbers.finish(values)
        if self._numbers.pinned:
            raise NumberNotLateError(self._pinned_names(), "its value decides a shape or an operator")

    def moved(self, alias: OutputAlias | None, tensors: int) -> OutputAlias | None:
        """Return the alias of an output as it is with the numbers before the inputs.

        Args:
            alias: as it is without numbers.
            tensors: how many placeholders come before the numbers.
        """
        if alias is None or alias.placeholder is None or alias.placeholder < tensors:
            return alias
        return replace(alias, placeholder=alias.placeholder + len(self._slots))

    def binding(self) -> LateBinding:
        """Return what is to be read and checked at every call."""
        types = tuple(type(value) for value in self._values)
        return LateBinding(self._slots, types, tuple(self._numbers.decisions))

    def _pinned_names(self) -> tuple[str, ...]:
        return tuple(self._slots[index].name for index in sorted(self._numbers.pinned))


def refuse_other_graph(captured: CapturedStep, late: LateRequest) -> None:
    """Refuse a step with late-bound numbers that is not the same step as its base.

    Raises:
        NumberNotLateError: if it differs.
    """
    base = late.base
    names = [slot.name for slot in captured.reads.late.slots]
    present = {item.name: item.number for item in captured.inputs if item.role is Role.NUMBER}
    numbers = [late.constants.get(name, present[name]) for name in names]
    if not captured.reads.late.suits(numbers):
        raise NumberNotLateError((), "another branch is taken by it", is_lasting=False)
    filled_in = _operators(captured, dict(zip(names, numbers, strict=True)))
    if _interface(captured) != _interface(base) or filled_in != _operators(base, present):
        raise NumberNotLateError((), "the step does something else with it than to compute")


def _interface(captured: CapturedStep) -> tuple[object, ...]:
    """Return what flows in and out beside the numbers."""
    kept = [index for index, item in enumerate(captured.inputs) if item.role is not Role.NUMBER]
    without_numbers = {index: position for position, index in enumerate(kept)}
    outputs = [
        replace(leaf, placeholder=without_numbers[leaf.placeholder])
        if isinstance(leaf, OutputAlias) and leaf.placeholder is not None
        else _described(leaf)
        for _, leaf in captured.outputs.leaves
    ]
    return (
        [captured.inputs[index] for index in kept],
        sorted(without_numbers[index] for index in captured.written),
        [without_numbers[index] for index in captured.gradients],
        outputs,
        captured.outputs.spec,
        captured.differentiable,
        captured.gradient_tangents,
        captured.recomputed,
    )


def _operators(captured: CapturedStep, numbers: Mapping[str, float]) -> list[tuple[object, ...]]:
    """Return the operators of a graph in order, each with its arguments, with numbers filled in."""
    graph = captured.graph_module.graph
    known: dict[fx.Node, Any] = {}
    places: dict[fx.Node, object] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if item.role is Role.NUMBER:
            known[node] = numbers[item.name]
    operators: list[tuple[object, ...]] = []
    for node in graph.nodes:
        if node in known:
            continue
        if node.all_input_nodes and all(source in known for source in node.all_input_nodes):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                known[node] = known[node.args[0]]
                continue
            if not isinstance(node.target, OpOverload) and node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
                continue
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        described = [
            _described(places.get(leaf, known.get(leaf)) if isinstance(leaf, fx.Node) else leaf)
            for leaf in leaves
        ]
        places[node] = _Result(len(operators))
        target: object = node.target
        if node.op == "get_attr":
            target = _Constant(getattr(captured.graph_module, str(node.target)))
        elif node.op in ("placeholder", "output"):
            target = None
        operators.append((node.op, target, spec, described, _kinds(node.meta.get("val"))))
    return operators


class _Constant:
    """A constant of a graph, equal to one of the same values."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        one, two = self.value, other.value
        if one is two or not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
            return one is two
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)

    __hash__ = None  # type: ignore[assignment]


class _Result(int):
    """The result of an operator, by its position."""


def _described(leaf: Any) -> tuple[type, object]:
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def _kinds(value: Any) -> list[object]:
    return [
        (tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)
        if isinstance(leaf, torch.Tensor)
        else type(leaf)
        for leaf in pytree.tree_leaves(value)
    ]
