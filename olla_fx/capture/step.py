"""Captures forward, loss, backward and weight update, or inference, as one flat ATen graph.

With micro-batches the update is a second graph of the same placeholders.

The step is written as a function of all tensors it reads, differentiates with ``torch.autograd.grad``
and runs the optimizer's own code, and is traced once under fake tensors: nothing is
computed, no memory is used, and the user's model and optimizer stay untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from olla_fx import torch_compat
from olla_fx.capture.eager import FakeStep
from olla_fx.capture.model_copy import refuse_side_effects
from olla_fx.capture.refusals import (
    REWRITE,
    DependsOnValuesError,
    explained,
    no_python_randomness,
    refuse_baked_tensors,
    refuse_effects,
    refuse_mixed_types,
    refuse_unwritable,
)
from olla_fx.capture.symbols.comparison import refuse_other_step, signatures_of
from olla_fx.capture.symbols.formulas import Formulas, generalize
from olla_fx.capture.symbols.integers import integers_as_symbols
from olla_fx.capture.symbols.sizes import SymbolicSizes
from olla_fx.capture.tracing import Tracing
from olla_fx.capture.types import CapturedFamily, CapturedStep, OutputLayout, StepRequest
from olla_fx.capture.values.questions import Questions
from olla_fx.errors import CaptureError
from olla_fx.guards import NO_WRITES, FirstWrites, Mode, Role, StepInput, first_writes
from olla_fx.guards.writes import Place
from olla_fx.torch_compat import pytree


def capture(request: StepRequest) -> CapturedStep:
    """Capture a step.

    Raises:
        CaptureError: if the model depends on values of its data, rejects the example, has hooks or
            side effects, or its optimizer cannot be captured. Model and optimizer are untouched.
    """
    # Anomaly detection, if the caller enabled it, would read tensors without values.
    with torch_compat.without_saved_tensor_hooks(), torch.autograd.set_detect_anomaly(False):
        captured = _capture(request)
        read = replace(request, fields=captured.reads.fields)
        if read.modules().keys() != request.modules().keys():
            # A loss may be in reach of modules that it does not read: they are no part of the step.
            request, captured = read, _capture(read)
        if request.symbols.are_wanted:
            refuse_other_step(captured, request, _capture)
        return captured


def _capture(request: StepRequest) -> CapturedStep:
    first = _capture_once(request)
    if not first.writes:
        return _with_places(first, request)
    # The step that is planned is a later one, which writes nothing, and must compute what the first one does.
    later = _capture_once(replace(request, writes=first.writes))
    if [item.key for item in later.signatures] != [item.key for item in first.signatures]:
        raise CaptureError(
            "the model's forward computes something else after it wrote its attribute "
            f"{first.writes.names()}: call it once in eager before it is planned, or keep such state outside"
        )
    return _with_places(replace(later, writes=first.writes), request)


def _with_places(captured: CapturedStep, request: StepRequest) -> CapturedStep:
    """Let the plan fit only if what earlier forwards wrote is as it is now, or as this one writes it."""
    return replace(captured, writes=captured.writes.with_places(request.written_before, request.modules()))


def _capture_once(request: StepRequest) -> CapturedStep:
    questions = Questions(request, asks_numbers=False)
    try:
        captured = _captured(request, questions)
    except DependsOnValuesError:
        if not questions.left_open:
            raise
    else:
        if not _has_open_sizes(captured.graph_module):
            return captured
    # Some number decides control flow or a size; nobody says which, so that all are asked for.
    captured = _captured(request, Questions(request, asks_numbers=True))
    if _has_open_sizes(captured.graph_module):
        raise DependsOnValuesError(
            f"{type(request.model).__name__} has shapes that depend on the values of its tensors, and these "
            f"not on the inputs alone, so that no plan fits every step. {REWRITE}"
        )
    return captured


def _has_open_sizes(graph_module: fx.GraphModule) -> bool:
    return any(torch_compat.has_open_sizes(node.meta.get("val")) for node in graph_module.graph.nodes)


def _captured(request: StepRequest, questions: Questions) -> CapturedStep:
    tracing, graph_module = _trace(request, frozenset(), questions)
    if tracing.without_gradient:
        _refuse_lost_gradients(request, tracing.without_gradient, questions)
    if tracing.without_gradient and request.mode is Mode.TRAINING:
        tracing, graph_module = _trace(request, frozenset(tracing.without_gradient), questions)
    if tracing.outputs is None:
        raise CaptureError(f"{type(request.model).__name__} returned nothing that can be captured")
    arguments, family = tracing.arguments, None
    if arguments.sizes is not None:
        family = _family(tracing, arguments.sizes, tracing.outputs, graph_module, questions)
    outputs = tracing.outputs if family is None else tracing.outputs.with_numbers(torch_compat.hint_of)
    update_graph = _trace_update(tracing) if request.runs_in_micro_batches else None
    captured = CapturedStep(
        mode=request.mode,
        graph_module=graph_module,
        inputs=tuple(arguments.inputs),
        written=_written(graph_module, arguments.inputs) | _written(update_graph, arguments.inputs),
        outputs=outputs,
        differentiable=tracing.differentiable,
        gradients=tracing.gradients,
        gradient_tangents=_tangents_of_gradients(graph_module, tracing),
        recomputed=tracing.recomputed,
        slots=tuple(tuple(places) for places in arguments.slots),
        optimizer=arguments.layout,
        state_keys={name: tuple(values) for name, values in arguments.state.items()},
        reads=tracing.baked_values(),
        device=arguments.device,
        writes=tracing.writes,
        questions=questions.asked if family is None else family.questions_at(family.hints),
        family=family,
    )
    if not _has_open_sizes(graph_module):  # else it is traced again
        captured = replace(captured, signatures=signatures_of(captured))
    if update_graph is None:
        return captured
    nothing = OutputLayout(pytree.tree_structure([]), ())
    _refuse_written_questions(captured)
    update = replace(captured, graph_module=update_graph, outputs=nothing, recomputed=0, questions=())
    return replace(captured, micro_batches=request.options.accumulation_steps, update=update)


def _refuse_written_questions(captured: CapturedStep) -> None:
    """Refuse questions about inputs that a micro-batch writes to: all are asked before the first one runs."""
    examples = [index for index, item in enumerate(captured.inputs) if item.role is Role.EXAMPLE]
    for question in captured.questions:
        if any(examples[index] in captured.written for index in question.recipe.inputs):
            raise CaptureError(
                f"the model asks for the value of {question.recipe.words}{question.place}, and writes to "
                "that input in each micro-batch, which may change the answer for the next one. Let it write "
                "to a copy, or accumulate gradients in a loop of your own"
            )


def _family(
    tracing: Tracing,
    sizes: SymbolicSizes,
    outputs: OutputLayout,
    graph_module: fx.GraphModule,
    questions: Questions,
) -> CapturedFamily:
    """Generalize a graph that was traced with symbolic sizes."""
    keys = {question.key for question in questions.asked}
    known = {
        key: count
        for key, count in sizes.counts.items()
        if key in keys and not torch_compat.is_constant(count)
    }
    varying, of_inputs, fixed = sizes.varying, sizes.sizes, []
    if tracing.request.symbols.may_fix:
        at = [index for index, size in enumerate(of_inputs) if torch_compat.is_constant(size)]
        fixed, varying = [of_inputs[index] for index in at], varying.without(at)
        of_inputs = tuple(size for index, size in enumerate(of_inputs) if index not in at)
    if not of_inputs and not known:
        raise CaptureError("the step needs all sizes, and what it asks of its inputs, as numbers")
    formulas = Formulas([*of_inputs, *known.values()])
    generalize(graph_module, formulas)
    arguments = tracing.arguments
    inputs = {
        index: (tuple(map(formulas.of, tensor.shape)), tuple(map(formulas.of, tensor.stride())))
        for index, (tensor, item) in enumerate(zip(arguments.flat, arguments.inputs, strict=True))
        if item.role in (Role.EXAMPLE, Role.TANGENT)
    }
    answer = outputs.with_numbers(formulas.of)
    index_of = {key: index for index, key in enumerate(known)}
    asked = tuple(
        replace(question.with_numbers(formulas.known), count=index_of.get(question.key))
        for question in questions.asked
    )
    fixed += [count for key, count in sizes.counts.items() if key not in known]
    conditions = formulas.conditions(torch_compat.guards_of(arguments.fake_mode, fixed))
    return CapturedFamily(
        varying,
        tuple(map(torch_compat.hint_of, known.values())),
        formulas.compiled(),
        formulas.of_counts(len(of_inputs)),
        conditions,
        inputs,
        answer,
        asked,
    )


def _trace(
    request: StepRequest, unused: frozenset[str], questions: Questions
) -> tuple[Tracing, fx.GraphModule]:
    """Trace a step that does not train the parameters ``unused``, which no gradient reaches."""
    tracing = Tracing(request, unused, questions)
    arguments, copies = tracing.arguments, tracing.arguments.model_copy
    attributes, values = copies.attributes(), copies.plain_values()
    with (
        explained(request.model),
        arguments.late.traced(),
        torch.random.fork_rng(devices=[]),
        no_python_randomness(),
        torch_compat.attribute_reads() as tracing.reads,
        copies.objects.heard(),
        integers_as_symbols(request.symbols.askers),
    ):
        graph_module = torch_compat.trace_functional(tracing.step, arguments.flat, arguments.fake_mode)
    arguments.late.finish(graph_module)
    tracing.writes = _first_writes(tracing, attributes, values)
    refuse_effects(graph_module, len(arguments.inputs))
    refuse_baked_tensors(graph_module, request.modules())
    refuse_mixed_types(graph_module, request.model)
    refuse_unwritable(graph_module, request.model)
    return tracing, graph_module


def _first_writes(
    tracing: Tracing, attributes: Mapping[str, object], values: Mapping[Place, object]
) -> FirstWrites:
    """Return the plain values that a traced forward wrote on attributes; refuse all else that it changed.

    Args:
        tracing: after its run.
        attributes: of the copies, before it.
        values: the plain ones of them.
    """
    copies = tracing.arguments.model_copy
    refuse_side_effects(*copies.objects.changes())
    if tracing.request.writes:
        refuse_side_effects(attributes, copies.attributes())
    if copies.attributes() == attributes:
        return NO_WRITES
    writes = first_writes(values, copies.plain_values())
    writes.undo(copies.modules)
    refuse_side_effects(attributes, copies.attributes())
    return writes


def _trace_update(tracing: Tracing) -> fx.GraphModule:
    arguments = tracing.arguments
    with explained(tracing.request.model):
        return torch_compat.trace_functional(tracing.update, arguments.flat, arguments.fake_mode)


def _written(graph_module: fx.GraphModule | None, inputs: Sequence[StepInput]) -> frozenset[int]:
    """Return the user's tensors that a graph updates; functionalisation leaves one ``copy_`` for each."""
    if graph_module is None:
        return frozenset()
    copies = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    targets = {copy.args[0] for copy in copies}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(
        index
        for index, (node, step_input) in enumerate(zip(placeholders, inputs, strict=True))
        if node in targets and step_input.role is not Role.GRADIENT
    )


def _tangents_of_gradients(graph_module: fx.GraphModule, tracing: Tracing) -> tuple[frozenset[int], ...]:
    """Return for each gradient which tangents reach it; if none of them is given, eager has no gradient."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, tracing.arguments.inputs, strict=True)
    tangents = [node for node, step_input in pairs if step_input.role is Role.TANGENT]
    reached: dict[fx.Node, frozenset[int]] = {node: frozenset({index}) for index, node in enumerate(tangents)}
    for node in graph_module.graph.nodes:
        if node not in reached:
            reached[node] = frozenset().union(*(reached[source] for source in node.all_input_nodes))
    results = cast(Sequence[fx.Node], graph_module.graph.output_node().args[0])
    return tuple(reached[gradient] for gradient in results[len(results) - len(tracing.gradients) :])


def _refuse_lost_gradients(request: StepRequest, without: Sequence[str], questions: Questions) -> None:
    """Refuse a step if eager's ``backward`` reaches a parameter that capturing leaves without a gradient.

    Reentrant checkpointing differentiates inside a backward node, which ``torch.autograd.grad`` does
    not see: the parameters under it would silently stop learning.
    """
    eager = FakeStep(request, questions=questions)
    with explained(request.model), torch.random.fork_rng(devices=[]), questions.unnoted():
        eager.backward()
    lost = sorted(name for name in without if eager.parameters[name].grad is not None)
    if lost:
        raise CaptureError(
            f"capturing loses the gradient of {lost[0]} (and {len(lost) - 1} more), which eager has: the "
            "model uses torch.utils.checkpoint with use_reentrant=True. Pass use_reentrant=False"
        )
