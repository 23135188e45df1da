"""Compares a step that was captured with symbols with one that was captured with numbers in their places.

A symbol may stand for a size of the inputs or for a Python number of the user's. What code does with a symbol
may differ from what it does with a number: ``isinstance(number, float)`` is false, and some code asks for a
size in a way that PyTorch does not see. So a step with symbols is kept only if it is, with numbers filled in
for all of them, the step that was captured with these numbers: operators, arguments, layouts, what flows in
and out, and what was asked of the inputs. They are other numbers than those that the tracer saw, so that one
that slipped through shows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.capture.symbols.formulas import size_of
from olla_fx.capture.types import (
    CapturedFamily,
    CapturedStep,
    OutputAlias,
    Signature,
    StepRequest,
    SymbolRequest,
)
from olla_fx.capture.varying import LEAST
from olla_fx.errors import CaptureError, NumberNotLateError
from olla_fx.fx_graph import LAYOUTS, Size, descendants
from olla_fx.guards import Question, Role, TensorSpec
from olla_fx.torch_compat import OpOverload, pytree

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 16
"""Of constants that are compared by their values; larger ones are the same if they are one object."""

_FARTHEST = 1024
"""How far from a size another one is looked for."""

Resolve = Callable[[Any], Any]
"""Gives a formula's value; other values as they are."""


def refuse_other_step(
    captured: CapturedStep, request: StepRequest, capture: Callable[[StepRequest], CapturedStep]
) -> None:
    """Refuse a step with symbols that is not the step that was captured with numbers; name it like that.

    Args:
        captured: the step with symbols.
        request: what it was captured for.
        capture: captures the step with numbers, if the earlier one took another branch.

    Raises:
        CaptureError: if they differ.
        NumberNotLateError: if they may differ by a number that was bound late.
    """
    symbols = request.symbols
    earlier, constants = symbols.earlier, symbols.constants
    sizes = None if earlier is None else _sizes_of_earlier(captured, symbols, earlier)
    if earlier is None or sizes is None:
        if constants:
            raise NumberNotLateError((), "another branch is taken by it or beside it", is_lasting=False)
        if captured.family is None:
            raise CaptureError("another branch is taken than by the step before")
        _refuse_fixed_sizes(captured.family)
        sizes = _sizes_beside(captured.family)
        binding = captured.reads.late
        pairs = zip(binding.slots, binding.gather(), strict=True)
        constants = {slot.name: number for slot, number in pairs}
        earlier = capture(_with_numbers(request, captured, sizes))
    try:
        difference = _difference(captured, earlier, sizes, constants)
    except (ArithmeticError, TypeError, ValueError):  # by computing with the constants
        difference = "a number"
    if difference is not None and symbols.constants:
        raise NumberNotLateError((), f"the step does something else with it than to compute, at {difference}")
    if difference is not None:
        raise CaptureError(f"with symbols as sizes the step differs at {difference}")
    nodes = [node for node, _ in _described(captured, sizes, constants)]
    for node, signature in zip(nodes, earlier.signatures, strict=False):
        if node is not None and len(nodes) == len(earlier.signatures):
            node.name = signature.name


def signatures_of(captured: CapturedStep) -> tuple[Signature, ...]:
    """Describe what a captured step does, before passes; at the hints, if sizes vary."""
    sizes = () if captured.family is None else captured.family.hints
    return tuple(
        Signature("what flows in and out" if node is None else node.name, key)
        for node, key in _described(captured, sizes, {})
    )


def _sizes_of_earlier(
    captured: CapturedStep, symbols: SymbolRequest, earlier: CapturedStep
) -> tuple[int, ...] | None:
    """Return the sizes of the earlier call, counts among them.

    Returns:
        None if the step with symbols would not be traced alike for that call, or if a count was the same: a
        symbol that slipped through would not show.
    """
    family, sizes = captured.family, symbols.sizes
    if family is not None:
        counts = family.counts_among(earlier.questions)
        if counts is None or any(now == then for now, then in zip(family.counts, counts, strict=True)):
            return None
        sizes = (*sizes, *counts)
    return sizes if _took_same_branches(captured, symbols, earlier, sizes) else None


def _took_same_branches(
    captured: CapturedStep, symbols: SymbolRequest, earlier: CapturedStep, sizes: Sequence[int]
) -> bool:
    """Return True if the step with symbols would be traced alike for the earlier call."""
    family, binding = captured.family, captured.reads.late
    if family is not None and not _is_for(family, sizes):
        return False
    numbers = [
        symbols.constants.get(slot.name, number)
        for slot, number in zip(binding.slots, binding.gather(), strict=True)
    ]
    asked = captured.questions if family is None else family.questions_at(sizes)
    return binding.suits(numbers) and _answers(asked) == _answers(earlier.questions)


def _answers(questions: Sequence[Question]) -> list[tuple[str, str]]:
    return [(question.recipe.key, repr(question.answer)) for question in questions if question.recipe.inputs]


def _is_for(family: CapturedFamily, sizes: Sequence[int]) -> bool:
    """Return True if some sizes are such as tracing has assumed, as far as sizes alone decide."""
    if not all(family.conditions(*sizes)):
        return False
    of_sizes = (question for question in family.questions_at(sizes) if not question.recipe.inputs)
    device = torch.device("cpu")
    return all(repr(asked.recipe.evaluate((), device)) == repr(asked.answer) for asked in of_sizes)


def _neighbour(family: CapturedFamily, hints: Sequence[int], index: int) -> tuple[int, ...] | None:
    """Return sizes like these, of which one is another, the nearest that the family is for.

    Where none is, as it has to be equal to others, those that are equal to it are others, too.
    """
    hint = hints[index]
    values = [hint + sign * distance for distance in range(1, min(hint, _FARTHEST) + 1) for sign in (-1, 1)]
    alone = ((*hints[:index], value, *hints[index + 1 :]) for value in values if value >= LEAST)
    together = (
        tuple(value if size == hint else size for size in hints) for value in values if value >= LEAST
    )
    return next((sizes for sizes in itertools.chain(alone, together) if _is_for(family, sizes)), None)


def _refuse_fixed_sizes(family: CapturedFamily) -> None:
    """Refuse a family whose conditions hold for one value of a size alone."""
    for index, hint in enumerate(family.varying.hints):
        if _neighbour(family, family.hints, index) is None:
            raise CaptureError(f"the step needs a size ({hint}) as a number")


def _sizes_beside(family: CapturedFamily) -> tuple[int, ...]:
    """Return sizes of a family that are others than those for which it was captured, as far as can be."""
    sizes = family.hints
    for index in range(len(sizes)):
        sizes = _neighbour(family, sizes, index) or sizes
    return sizes


def _with_numbers(request: StepRequest, captured: CapturedStep, sizes: Sequence[int]) -> StepRequest:
    """Return the request for a step with numbers as sizes, on inputs without values."""
    family = captured.family
    if family is None:
        raise CaptureError("no sizes vary")
    tensors = iter(family.varying.tensors)
    with torch_compat.new_fake_mode():
        inputs = pytree.tree_map_only(
            torch.Tensor,
            lambda leaf: next(tensors).empty(sizes, TensorSpec.of(leaf)).requires_grad_(leaf.requires_grad),
            request.inputs,
        )
    return replace(
        request,
        inputs=inputs,
        answers={question.recipe.key: question.answer for question in family.questions_at(sizes)},
        tangent_strides=captured.at(sizes).tangent_strides,
        symbols=SymbolRequest(),
    )


def _difference(
    captured: CapturedStep, earlier: CapturedStep, sizes: Sequence[int], constants: Mapping[str, float]
) -> str | None:
    """Return where a step differs from one that was captured with numbers; None if they are equal."""
    own = _described(captured, sizes, constants)
    may_differ: set[fx.Node] = set()
    if captured.at(sizes).tangent_strides != earlier.tangent_strides:
        # Backward was captured for gradients in other layouts then: what comes before it must be the same.
        pairs = zip(captured.graph_module.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
        backward = descendants([node for node, item in pairs if item.role is Role.TANGENT])
        nodes = [node for node, _ in own if node is not None]
        first = next(at for at, node in enumerate(nodes) if node in backward and node.op != "placeholder")
        may_differ = {*backward, *nodes[first:]}
    for (node, key), signature in zip(own, earlier.signatures, strict=False):
        if key != signature.key and node not in may_differ:
            return signature.name
    return "the number of operators" if len(own) != len(earlier.signatures) and not may_differ else None


def _described(
    captured: CapturedStep, sizes: Sequence[int], constants: Mapping[str, float]
) -> list[tuple[fx.Node | None, int]]:
    """Describe what flows in and out, then the operators of a graph in order.

    Args:
        captured: the step.
        sizes: to fill in, if sizes vary.
        constants: numbers to fill in for those that are bound late, by name.
    """
    resolve: Resolve = (lambda value: value) if captured.family is None else captured.family.resolver(sizes)
    graph_module, graph = captured.graph_module, captured.graph_module.graph
    known: dict[fx.Node, Any] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if item.role is Role.NUMBER and item.name in constants:
            known[node] = constants[item.name]
    names: dict[fx.Node, str] = {}
    described: list[tuple[fx.Node | None, int]] = [(None, hash(repr(_interface(captured.at(sizes)))))]
    for node in graph.nodes:
        if node in known or _is_computed(node, known, resolve):
            continue
        if node.target is aten.alias.default:  # indexing makes it of a slice that takes everything
            names[node] = names[node.args[0]]
            continue
        target = str(node.target)
        if node.op in ("placeholder", "output"):
            target = ""
        elif node.op == "get_attr":
            target = _constant(graph_module, node)
        names[node] = f"%{len(described)}"
        arguments = f"{_text(node.args, known, names)} {_text(node.kwargs, known, names)}"
        described.append((node, hash(f"{node.op} {target} {arguments} {_layouts_at(node, resolve)}")))
    return described


def _is_computed(node: fx.Node, known: dict[fx.Node, Any], resolve: Resolve) -> bool:
    """Return True, and note the value, if a node is a number that is known."""
    size = size_of(node)
    if isinstance(size, Size):
        known[node] = resolve(size)
        return True
    sources = node.all_input_nodes
    if not sources or not all(source in known for source in sources):
        return False
    if node.target is aten._local_scalar_dense.default:
        known[node] = known[sources[0]]
        return True
    if node.op == "call_function" and not isinstance(node.target, OpOverload):
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        function: Any = node.target
        known[node] = function(*args, **kwargs)
        return True
    return False


def _interface(captured: CapturedStep) -> list[object]:
    """Return what flows in and out beside numbers, and beside tangents, which are placeholders."""
    unnamed = (Role.NUMBER, Role.TANGENT)
    kept = [index for index, item in enumerate(captured.inputs) if item.role not in unnamed]
    position = {index: at for at, index in enumerate(kept)}
    outputs = [
        replace(leaf, placeholder=position[leaf.placeholder])
        if isinstance(leaf, OutputAlias) and leaf.placeholder is not None
        else leaf
        for _, leaf in captured.outputs.leaves
    ]
    return [
        [captured.inputs[index] for index in kept],
        sorted(position[index] for index in captured.written),
        [position[index] for index in captured.gradients],
        outputs,
        captured.outputs.spec,
        captured.differentiable,
        captured.recomputed,
    ]


def _constant(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """Describe a constant of a graph: all but large ones by their values."""
    value = getattr(graph_module, str(node.target))
    if isinstance(value, fx.GraphModule):
        return repr(value.code)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS:
        with torch_compat.real_tensors():
            elements = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{hashlib.blake2b(elements).hexdigest()}"
    return f"object {id(value)}"


def _layouts_at(node: fx.Node, resolve: Resolve) -> list[tuple[Any, ...]]:
    """Return the layouts of a node's tensors; of views alone it counts where in their storage they begin."""
    is_new = isinstance(node.target, OpOverload) and not node.target.is_view
    layouts = node.meta.get(LAYOUTS)
    if layouts is None:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        described = [(tuple(one.shape), one.stride(), one.storage_offset()) for one in tensors]
    else:
        described = [
            (tuple(map(resolve, one.shape)), tuple(map(resolve, one.stride)), resolve(one.offset))
            for one in layouts
            if one is not None
        ]
    return [(shape, _steps(shape, steps), None if is_new else first) for shape, steps, first in described]


def _steps(shape: Sequence[Any], stride: Sequence[Any]) -> tuple[Any, ...]:
    """Return strides without those that nobody takes; symbols and numbers may differ in these."""
    return tuple(None if extent == 1 else step for extent, step in zip(shape, stride, strict=True))


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
