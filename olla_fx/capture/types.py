"""The request for a captured step, and the captured step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from olla_fx.capture.varying import LEAST, TangentsSeen, VaryingSizes
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import Size
from olla_fx.guards import (
    NO_WRITES,
    Assumptions,
    FirstWrites,
    FromCounts,
    Mode,
    NumberSlot,
    Question,
    Role,
    TensorSlot,
    step_modules,
)
from olla_fx.guards.snapshot import FieldsRead
from olla_fx.guards.writes import Place
from olla_fx.options import Options
from olla_fx.torch_compat import pytree

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """An output that lies in the memory of an input of the graph or of another output.

    It is made anew from that tensor, outside the graph, so that autograd knows the two for views.

    Attributes:
        result: index of the result that it looks into; None for an input.
        placeholder: index of the placeholder that it looks into; None for a result.
        shape: its extents; numbers, like the following, but while sizes vary.
        stride: its element strides.
        offset: where it begins, in elements from the other's beginning.
        whole: True if it is the other tensor itself.
        detached: True if autograd is not to follow it.
    """

    result: int | None
    placeholder: int | None
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    whole: bool
    detached: bool

    def of(self, results: Sequence[torch.Tensor], values: Sequence[Any]) -> torch.Tensor:
        """Return the output.

        Args:
            results: of the graph.
            values: of its placeholders.
        """
        base: torch.Tensor = (
            values[self.placeholder] if self.placeholder is not None else results[self.result or 0]
        )
        if not self.whole:
            base = base.as_strided(self.shape, self.stride, int(base.storage_offset()) + self.offset)
        return base.detach() if self.detached else base


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """The way from the graph's flat results to what the caller gets.

    Attributes:
        spec: pytree of the answer.
        leaves: for each leaf, the index of a graph result, or the constant or alias itself.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    @property
    def results(self) -> int:
        """The number of the graph's results that belong to the answer."""
        return sum(is_result for is_result, _ in self.leaves)

    def with_numbers(self, number: Callable[[Any], Any]) -> OutputLayout:
        """Return the same with every number in it replaced.

        Args:
            number: gives what takes a number's place.
        """
        leaves: list[tuple[bool, Any]] = []
        for is_result, leaf in self.leaves:
            if isinstance(leaf, OutputAlias):
                shape, stride = tuple(map(number, leaf.shape)), tuple(map(number, leaf.stride))
                leaves.append((False, replace(leaf, shape=shape, stride=stride, offset=number(leaf.offset))))
            else:
                leaves.append((is_result, leaf if is_result else number(leaf)))
        return OutputLayout(self.spec, tuple(leaves))

    def rebuild(self, results: Sequence[torch.Tensor], values: Sequence[Any] = ()) -> Any:
        """Return the answer with the caller's own structure.

        Args:
            results: of the graph.
            values: of its placeholders, needed if outputs look into them.
        """
        leaves = [
            results[leaf]
            if is_result
            else leaf.of(results, values)
            if isinstance(leaf, OutputAlias)
            else leaf
            for is_result, leaf in self.leaves
        ]
        return leaves[0] if self.spec.is_leaf() else pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operator of a captured graph does, to be compared.

    Attributes:
        name: the node's.
        key: equal for equal arguments and results.
    """

    name: str
    key: int


@dataclass(frozen=True)
class CapturedFamily:
    """What a step that was captured with symbolic sizes is at any sizes.

    Attributes:
        varying: the sizes of the inputs.
        counts: the values of the counts, numbers that Python asked of the inputs, in the captured call. They
            follow the inputs' sizes in what is called sizes below.
        formulas: gives of the sizes the value of each :class:`~olla_fx.fx_graph.Size`.
        of_counts: gives the value of one that follows from counts, by its index, of the sizes of the inputs
            and the counts that were asked for before.
        conditions: gives of the sizes the truth of each condition that tracing has assumed.
        inputs: shape and stride of the placeholders that vary, by their indices.
        outputs: the way from results to the answer.
        questions: what Python asked about the inputs' values; those for counts have the index of theirs.
    """

    varying: VaryingSizes
    counts: tuple[int, ...]
    formulas: Callable[..., tuple[Any, ...]]
    of_counts: Mapping[int, FromCounts]
    conditions: Callable[..., tuple[Any, ...]]
    inputs: Mapping[int, tuple[tuple[Any, ...], tuple[Any, ...]]]
    outputs: OutputLayout
    questions: tuple[Question, ...]

    def resolver(self, sizes: Sequence[int]) -> Callable[[Any], Any]:
        """Return a function that gives a formula's value at some sizes, and other values as they are."""
        numbers = self.formulas(*sizes)
        return lambda value: numbers[value.index] // value.parts if isinstance(value, Size) else value

    @property
    def hints(self) -> tuple[int, ...]:
        """The sizes of the captured call."""
        return (*self.varying.hints, *self.counts)

    def questions_at(self, sizes: Sequence[int]) -> tuple[Question, ...]:
        """Return what Python asks at some sizes."""
        resolve = self.resolver(sizes)
        counts = sizes[len(self.varying.hints) :]
        answered = (
            question
            if question.count is None
            else replace(question, answer=counts[question.count], count=None)
            for question in self.questions
        )
        return tuple(question.with_numbers(resolve) for question in answered)

    def questions_before(self, of_inputs: Sequence[int]) -> tuple[Question, ...]:
        """Return what Python asks before the counts are known.

        Args:
            of_inputs: the sizes of the inputs.
        """
        if not self.counts:
            return self.questions_at(of_inputs)
        resolve = self.resolver((*of_inputs, *self.counts))

        def before(value: Any) -> Any:
            follows = self.of_counts.get(value.index) if isinstance(value, Size) else None
            return resolve(value) if follows is None else follows.at(of_inputs)

        return tuple(question.with_numbers(before) for question in self.questions)

    def counts_among(self, questions: Sequence[Question]) -> tuple[int, ...] | None:
        """Return the counts among the answers of the same step, captured with numbers.

        Args:
            questions: of that step.

        Returns:
            None if it asked otherwise, or a count was one that is no symbol.
        """
        own = [question for question in self.questions if question.recipe.inputs]
        others = [question for question in questions if question.recipe.inputs]
        if len(own) != len(others):
            return None
        pairs = zip(own, others, strict=True)
        counts = [other.answer for question, other in pairs if question.count is not None]
        return tuple(counts) if all(type(count) is int and count >= LEAST for count in counts) else None


@dataclass(frozen=True, kw_only=True)
class CapturedStep(Assumptions):
    """A step as one graph, and what it assumes.

    Attributes:
        graph_module: functional but for trailing ``copy_`` into static arrays.
        outputs: the way from results to the answer.
        differentiable: for each result of the answer, True if a tangent comes back for it.
        gradients: indices of the placeholders whose gradients follow the answer among the results.
        gradient_tangents: for each gradient, the tangents that it depends on.
        recomputed: how many operators are there a second time because the model checkpoints activations.
        micro_batches: how often it runs in a step, with one part of the batch after the other.
        questions: what Python asked about the inputs' values, in order; the graph holds for these answers.
        signatures: what it does, to compare it with the same step of other sizes and numbers.
        update: the weight update that follows several micro-batches; it has the same placeholders.
        family: what it is at other sizes, if it was captured with sizes that vary.
    """

    graph_module: fx.GraphModule
    outputs: OutputLayout
    differentiable: tuple[bool, ...]
    gradients: tuple[int, ...]
    gradient_tangents: tuple[frozenset[int], ...]
    recomputed: int
    micro_batches: int = 1
    questions: tuple[Question, ...] = ()
    signatures: tuple[Signature, ...] = ()
    update: CapturedStep | None = None
    family: CapturedFamily | None = None

    def at(self, sizes: Sequence[int]) -> CapturedStep:
        """Return what flows into the step and out of it at some sizes; itself if none vary."""
        if self.family is None:
            return self
        resolve = self.family.resolver(sizes)
        inputs = list(self.inputs)
        for index, (shape, stride) in self.family.inputs.items():
            spec = inputs[index].spec
            if spec is not None:
                at_size = replace(spec, shape=tuple(map(resolve, shape)), stride=tuple(map(resolve, stride)))
                inputs[index] = replace(inputs[index], spec=at_size)
        outputs = self.family.outputs.with_numbers(resolve)
        questions = self.family.questions_at(sizes)
        return replace(self, inputs=tuple(inputs), outputs=outputs, questions=questions)

    @property
    def assumptions(self) -> Assumptions:
        """What it assumes alone: what checks it at every call does not hold on to the graph."""
        names = [assumed.name for assumed in dataclasses.fields(Assumptions)]
        return Assumptions(**{name: getattr(self, name) for name in names})

    @functools.cached_property
    def tangent_strides(self) -> tuple[tuple[int, ...], ...]:
        """Element strides of the tangents, in order."""
        specs = [step_input.spec for step_input in self.inputs if step_input.role is Role.TANGENT]
        return tuple(spec.stride for spec in specs if spec is not None)

    @functools.cached_property
    def wanted(self) -> tuple[int, ...]:
        """Indices of the placeholders that want a gradient, tangents aside."""
        return tuple(
            index
            for index, step_input in enumerate(self.inputs)
            if step_input.role is not Role.TANGENT
            and step_input.spec is not None
            and step_input.spec.requires_grad
        )


@dataclass(frozen=True)
class SymbolRequest:
    """What a step is to be captured with symbols for: numbers and sizes that change from call to call.

    Attributes:
        slots: where the numbers are that are to be read at every call.
        varying: the sizes of the inputs that are to be symbols; None for none.
        counts: True if numbers that Python asks of the inputs are to be symbols, beside the sizes.
        tangents_seen: in the caller's own loop, then, the tangents at other sizes.
        earlier: the same step, captured before with some of them as constants; None if there is none.
        constants: the numbers among ``slots`` that were constants then, as they were, by name.
        sizes: the sizes of the inputs then.
        may_fix: True if sizes that the step needs as numbers are to be numbers, and no cause to refuse it.
        askers: global variables of the functions that asked inputs for numbers then.
    """

    slots: tuple[NumberSlot, ...] = ()
    varying: VaryingSizes | None = None
    counts: bool = False
    tangents_seen: TangentsSeen | None = None
    earlier: CapturedStep | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    may_fix: bool = False
    askers: tuple[dict[str, Any], ...] = ()

    @property
    def are_wanted(self) -> bool:
        """True if anything is to be a symbol."""
        return bool(self.slots) or self.varying is not None


@dataclass(frozen=True)
class StepRequest:
    """A step that is to be captured.

    Attributes:
        model: the user's; not changed.
        inputs: of the model in sequence, then :class:`~olla_fx.capture.arguments.NamedInputs` if it takes
            some by name only; for training the last one is the target.
        mode: the part of the step.
        loss_fn: ``loss_fn(model(*inputs), target)`` must give a scalar.
        optimizer: the user's; not changed.
        options: how to plan and run it.
        tangent_strides: in the caller's own loop, the element strides of the tangents, in order; empty for
            those of the outputs that they belong to.
        answers: what was answered to questions about inputs before, by the keys of their recipes, where the
            inputs may have no values.
        writes: what a forward writes on Python attributes the first time, which is to have happened.
        written_before: the places to which forwards of earlier captures write in this manner.
        symbols: what is to be a symbol.
        numbers: the Python numbers among the inputs by their positions: a dictionary that holds those of the
            present call at every later call, too; None if there are no later calls.
        fields: what the loss reads from objects, if that is known: modules beside that are no part of
            the step.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    mode: Mode
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    options: Options = field(default_factory=Options)
    tangent_strides: tuple[tuple[int, ...], ...] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)
    writes: FirstWrites = NO_WRITES
    written_before: frozenset[Place] = frozenset()
    symbols: SymbolRequest = field(default_factory=SymbolRequest)
    numbers: dict[str, Any] | None = None
    fields: FieldsRead = field(default_factory=dict)

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules that the step runs, by name."""
        return step_modules(self.model, self.loss_fn, self.fields)

    @property
    def runs_in_micro_batches(self) -> bool:
        """True if the step runs part by part, with the update after the last one."""
        return self.mode is Mode.TRAINING and self.options.accumulation_steps > 1


def plan_device(request: StepRequest, slots: Sequence[Sequence[TensorSlot]]) -> torch.device:
    """Return the one device of a step's tensors; meta tensors are planned as if on the CPU.

    Raises:
        CaptureError: if they are on several devices.
    """
    modules = request.modules()
    tensors = [places[0].table(modules[places[0].owner])[places[0].key] for places in slots]
    leaves = [leaf for leaf in pytree.tree_leaves(request.inputs) if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in [*tensors, *leaves]} - {torch.device("meta")}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CaptureError(f"model and inputs are on several devices ({names}); move them to one")
    return devices.pop() if devices else torch.device("cpu")
