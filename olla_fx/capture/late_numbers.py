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
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.refusals import DependsOnValuesError
from olla_fx.capture.types import CapturedStep, LateRequest, OutputAlias, StepRequest
from olla_fx.errors import NumberNotLateError
from olla_fx.guards import LateBinding, NumberSlot, Role, StepInput
from olla_fx.guards.numbers import root_in
from olla_fx.torch_compat import DATA_DEPENDENT_ERRORS, LateNumbers, OpOverload, pytree

_MOST_ELEMENTS = 1024
"""Of constants that are compared by their values; larger ones are the same if they are one object."""


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
        except DependsOnValuesError:
            raise
        except DATA_DEPENDENT_ERRORS:  # what is asked of inputs may have to be answered first
            raise
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
    """Refuse a step with late-bound numbers that is not the step that was captured with constants.

    Raises:
        NumberNotLateError: if it differs.
    """
    binding = captured.reads.late
    numbers = [
        late.constants.get(slot.name, number)
        for slot, number in zip(binding.slots, binding.gather(), strict=True)
    ]
    if not binding.suits(numbers):
        raise NumberNotLateError((), "another branch is taken by it", is_lasting=False)
    try:
        is_same = fingerprint(captured, late.constants) == late.fingerprint
    except (ArithmeticError, TypeError, ValueError):  # by computing with the constants
        is_same = False
    if not is_same:
        raise NumberNotLateError((), "the step does something else with it than to compute")


def fingerprint(captured: CapturedStep, constants: Mapping[str, float]) -> bytes:
    """Return what tells one captured step from another.

    Args:
        captured: the step.
        constants: late-bound numbers to fill in.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _interface(captured):
        digest.update(repr(part).encode())
    for operator in _operators(captured, constants):
        digest.update(operator.encode())
    return digest.digest()


def _interface(captured: CapturedStep) -> list[object]:
    """Return what flows in and out beside the numbers."""
    kept = [index for index, item in enumerate(captured.inputs) if item.role is not Role.NUMBER]
    without_numbers = {index: position for position, index in enumerate(kept)}
    outputs = [
        replace(leaf, placeholder=without_numbers[leaf.placeholder])
        if isinstance(leaf, OutputAlias) and leaf.placeholder is not None
        else leaf
        for _, leaf in captured.outputs.leaves
    ]
    return [
        [captured.inputs[index] for index in kept],
        sorted(without_numbers[index] for index in captured.written),
        [without_numbers[index] for index in captured.gradients],
        outputs,
        captured.outputs.spec,
        captured.differentiable,
        captured.recomputed,
    ]


def _operators(captured: CapturedStep, constants: Mapping[str, float]) -> Iterator[str]:
    """Yield the operators of a graph in order, each with its arguments, with numbers filled in."""
    graph_module = captured.graph_module
    graph = graph_module.graph
    known: dict[fx.Node, Any] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if item.role is Role.NUMBER and item.name in constants:
            known[node] = constants[item.name]
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node in known:
            continue
        if node.all_input_nodes and all(source in known for source in node.all_input_nodes):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                known[node] = known[node.all_input_nodes[0]]
                continue
            if node.op == "call_function" and not isinstance(node.target, OpOverload):
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
                continue
        target = _constant(graph_module, node) if node.op == "get_attr" else str(node.target)
        if node.op in ("placeholder", "output"):
            target = ""
        names[node] = f"%{len(names)}"
        yield f"{node.op} {target} {_text(node.args, known, names)} {_text(node.kwargs, known, names)};"


def _constant(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """Describe a constant of a graph: small ones by their values."""
    value = getattr(graph_module, str(node.target))
    if isinstance(value, fx.GraphModule):
        return value.code
    is_small = type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS
    return f"{value.dtype}{value.tolist()}" if is_small else f"object {id(value)}"


def _text(argument: Any, known: Mapping[fx.Node, Any], names: Mapping[fx.Node, str]) -> str:
    """Write an argument of an operator."""
    if isinstance(argument, fx.Node):
        if argument not in known:
            return names[argument]
        argument = known[argument]
    if isinstance(argument, tuple | list):
        return f"[{','.join(_text(part, known, names) for part in argument)}]"
    if isinstance(argument, dict):
        return f"{{{','.join(f'{key}={_text(part, known, names)}' for key, part in argument.items())}}}"
    if isinstance(argument, slice):
        return _text((argument.start, argument.stop, argument.step), known, names)
    return f"{type(argument).__name__}:{argument!r}"
