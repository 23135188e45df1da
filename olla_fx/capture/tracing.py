"""One tracing run: the fake arguments of a step, and the step as a function of them.

The function calls the model, the loss, ``torch.autograd.grad`` and the optimizer's own ``step`` on copies of
the user's objects that hold its arguments. With ``accumulation_steps`` it is a function of one micro-batch,
which adds its gradients to tensors that it is given; the update from these is a function of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.arguments import call_with
from olla_fx.capture.eager import FakeStep
from olla_fx.capture.eager_numerics import EagerNumerics
from olla_fx.capture.gradients import (
    checked_loss,
    clip,
    micro_batches,
    refuse_sparse,
    separated,
    share_of_loss,
)
from olla_fx.capture.inputs import Constant, HeldNumber, tensor_slots
from olla_fx.capture.integers import integers_as_symbols
from olla_fx.capture.late_numbers import LateTracing
from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.questions import Questions
from olla_fx.capture.refusals import explained, refuse_new_layouts
from olla_fx.capture.types import OutputAlias, OutputLayout, StepRequest, plan_device
from olla_fx.capture.updates import trace_updates
from olla_fx.capture.varying import SymbolicSizes, layout_in_extents
from olla_fx.errors import CaptureError
from olla_fx.guards import (
    NO_WRITES,
    WANTS_GRADIENT,
    Mode,
    OptimizerLayout,
    Reads,
    Role,
    StepInput,
    TensorSlot,
    TensorSpec,
    other_libraries,
)
from olla_fx.torch_compat import pytree


class Tracing:
    """One tracing run of a request.

    Attributes:
        request: what is traced.
        unused: parameters that no gradient reaches, which are not trained.
        fake_mode: of the arguments.
        slots: the modules' tensors with all their places.
        model_copy: the copies that are traced.
        reads: what the traced code read of modules, once traced.
        inputs: what each argument is.
        flat_arguments: the arguments.
        outputs: how results become the answer, once traced.
        aliases: for each tensor among the outputs of the caller's own loop, the tensor that it is a view of.
        writes: what the model wrote on its Python attributes, once traced.
        without_gradient: parameters that no gradient reached, once traced.
        differentiable: for each result of the answer, True if a tangent comes back for it, once traced.
        gradients: indices of the inputs whose gradients follow the answer, once traced.
        recomputed: the number of operators that checkpoints run again, once traced.
        late: the numbers that are bound late.
        layout: of the optimizer.
        state: of the optimizer, by parameter and key.
        device: where everything lives.
        example_leaves: for each leaf of the example, its index among the arguments, or the constant.
        sizes: the sizes of inputs that are symbols, if any are.
    """

    def __init__(self, request: StepRequest, unused: frozenset[str], questions: Questions) -> None:
        """Make the arguments.

        Args:
            request: what to trace.
            unused: parameters not to train.
            questions: answers what is asked of the inputs.
        """
        self.request = request
        self._questions = questions
        self.unused = unused
        self.fake_mode = torch_compat.new_fake_mode()
        symbols = request.symbols
        self.sizes = (
            None
            if symbols.varying is None
            else SymbolicSizes(symbols.varying, self.fake_mode, has_counts=symbols.counts)
        )
        self._originals = request.modules()
        self.slots = tensor_slots(self._originals)
        self.model_copy = ModelCopy(request, self.slots)
        self.reads: Mapping[tuple[int, str], nn.Module] = {}
        self.inputs: list[StepInput] = []
        self.flat_arguments: list[torch.Tensor] = []
        self.outputs: OutputLayout | None = None
        self.writes = NO_WRITES
        self.without_gradient: list[str] = []
        self.differentiable: tuple[bool, ...] = ()
        self.gradients: tuple[int, ...] = ()
        self.aliases: Sequence[OutputAlias | None] = ()
        self.recomputed = 0
        self._caches_casts = torch.is_autocast_cache_enabled()
        self.layout: OptimizerLayout | None = None
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.device = plan_device(request, self.slots)
        self._add_model_tensors()
        if request.optimizer is not None:
            self._add_optimizer(request.optimizer)
        self.late = LateTracing(request, self.model_copy, self.fake_mode)
        self.late.add_inputs(self.inputs, self.flat_arguments)
        self._add_examples()
        if request.mode is Mode.AUTOGRAD:
            self._add_tangents()
        if self.request.runs_in_micro_batches:
            self._add_gradients()

    def baked_values(self) -> Reads:
        """Return what the traced code read of its modules, as the user's own modules have it."""
        copies = {id(copy): (name, self._originals[name]) for name, copy in self.model_copy.modules.items()}
        known = frozenset((slot.owner, slot.key) for places in self.slots for slot in places)
        request, objects = self.request, self.model_copy.objects
        read = objects.fields(), objects.functions
        reads = Reads.of(self.reads, copies, known, request.loss_fn, request.numbers, *read)
        return replace(reads, late=self.late.binding())

    def _tensor(self, slot: TensorSlot) -> torch.Tensor:
        tensor: torch.Tensor = slot.table(self._originals[slot.owner])[slot.key]
        return tensor

    def _add(
        self,
        role: Role,
        name: str,
        spec: TensorSpec,
        batch: TensorSpec | None = None,
        symbolic: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step_input = StepInput(role, name, spec, batch)
        with self.fake_mode:
            fake: torch.Tensor = step_input.stand_in(self.device) if symbolic is None else symbolic
        self.inputs.append(step_input)
        self.flat_arguments.append(fake)
        return fake

    def _add_model_tensors(self) -> None:
        for places in self.slots:
            tensor = self._tensor(places[0])
            self._add(places[0].role, places[0].name, TensorSpec.of(tensor))

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizers.check_supported(optimizer)
        self.layout = optimizers.describe(optimizer, self._originals)
        trained = {item.name: item for item in self.inputs if item.role is Role.PARAMETER}
        for index, names in enumerate(self.layout.parameters):
            group = optimizer.param_groups[index]
            for name, parameter in zip(names, group["params"], strict=True):
                spec = trained[name].spec
                if parameter.is_complex():
                    raise CaptureError(f"parameter {name} is complex; training those cannot be captured yet")
                if spec is not None and spec.requires_grad and name not in self.unused:
                    self.state[name] = self._add_state(optimizer, group, name, parameter)
        for slot in self.layout.scalars:
            with self.fake_mode:
                self.flat_arguments.append(torch.empty((), dtype=torch.float64))
            self.inputs.append(StepInput(Role.SCALAR, slot.name, None))
        for tensor in self.layout.tensors:
            self._add(Role.HYPERPARAMETER, tensor.name, tensor.spec)

    def _add_state(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, parameter: nn.Parameter
    ) -> dict[str, torch.Tensor]:
        present = optimizer.state.get(parameter, {})
        if any(isinstance(value, torch.Tensor) for value in present.values()):
            values = {key: value for key, value in present.items() if value is not None}
        else:
            with self.fake_mode:
                fake = TensorSpec.of(parameter).empty(meta_as=self.device)
                values = optimizers.initial_state(optimizer, group, fake)
        loose = next((key for key, value in values.items() if not isinstance(value, torch.Tensor)), None)
        if loose is not None:
            raise CaptureError(
                f"the optimizer's state {loose!r} of {name} is {values[loose]!r}, not a tensor: it was saved "
                "by an older PyTorch; load it with optimizer.load_state_dict"
            )
        return {
            key: self._add(Role.STATE, f"{name}.{key}", TensorSpec.of(value)) for key, value in values.items()
        }

    def _add_examples(self) -> None:
        leaves, self.example_spec = pytree.tree_flatten(self.request.inputs)
        self.example_leaves: list[Any] = []
        first = micro_batches(leaves, self.request.options.accumulation_steps)[0]
        symbolic = iter(self._symbolic_examples())
        numbers = self.request.numbers or {}
        for index, (leaf, part) in enumerate(zip(leaves, first, strict=True)):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and self.request.mode is Mode.TRAINING:
                    raise CaptureError(f"input {index} {WANTS_GRADIENT}")
                batch = None if part is leaf else TensorSpec.of(leaf)
                self._add(Role.EXAMPLE, str(index), TensorSpec.of(part), batch, next(symbolic, None))
                self.example_leaves.append(len(self.flat_arguments) - 1)
            else:
                is_held = str(index) in numbers
                self.example_leaves.append(HeldNumber(numbers, str(index)) if is_held else Constant(leaf))

    def _symbolic_examples(self) -> list[torch.Tensor]:
        """Return stand-ins with symbolic sizes for the tensors of the example, if some sizes are symbols."""
        if self.sizes is None:
            return []
        leaves = [leaf for leaf in pytree.tree_leaves(self.request.inputs) if isinstance(leaf, torch.Tensor)]
        with self.fake_mode:
            return [
                self.sizes.stand_in(index, TensorSpec.of(leaf)).requires_grad_(leaf.requires_grad)
                for index, leaf in enumerate(leaves)
            ]

    def _add_gradients(self) -> None:
        """Add the tensors in which gradients accumulate, each in its parameter's layout."""
        specs = {item.name: item.spec for item in self.inputs if item.role is Role.PARAMETER}
        for name in self.trained:
            spec = specs[name]
            if spec is not None:
                self._add(Role.GRADIENT, name, replace(spec, requires_grad=False))

    def _add_tangents(self) -> None:
        """Add a tangent for each output that has a gradient; a first run under fake tensors tells which."""
        sizes, seen = self.sizes, self.request.symbols.tangents_seen
        # Nobody knows beforehand which extents follow from counts.
        is_symbolic = sizes is not None and (seen is None or seen.has_views or self.request.symbols.counts)
        made = self._outputs_made(is_symbolic=is_symbolic)
        shapes: list[Any] = [output.shape for output in made]
        if sizes is not None and seen is not None and not is_symbolic:
            extents = seen.extents(sizes.varying.hints, shapes)
            if extents is None:
                made = self._outputs_made(is_symbolic=True)
                shapes = [output.shape for output in made]
            else:
                shapes = [tuple(extent.of(sizes.sizes) for extent in shape) for shape in extents]
        strides: Sequence[Any] = self.request.tangent_strides or [output.stride() for output in made]
        if seen is not None:
            layouts = zip(shapes, seen.layouts, strict=True)
            strides = [
                tuple(extent.of(shape) for extent in layout_in_extents(*layout)) for shape, layout in layouts
            ]
        for index, (output, shape, stride) in enumerate(zip(made, shapes, strides, strict=True)):
            spec = replace(TensorSpec.of(output.detach()), shape=shape, stride=stride)
            with self.fake_mode:
                tangent = spec.empty(meta_as=self.device)
            self._add(Role.TANGENT, str(index), _at_hints(spec), symbolic=tangent)

    def _outputs_made(self, *, is_symbolic: bool) -> list[torch.Tensor]:
        """Return the outputs that have a gradient and are views of nothing; note what the others are.

        Args:
            is_symbolic: True to run forward with symbols as sizes, which takes several times as long.
        """
        given = (self.fake_mode, self._symbolic_examples(), self.sizes) if is_symbolic else ()
        eager = FakeStep(self.request, *given, questions=self._questions)
        with (
            explained(self.request.model),
            torch.random.fork_rng(devices=[]),
            self._questions.unnoted(),
            integers_as_symbols(self.request.symbols.askers if is_symbolic else ()),
        ):
            outputs = eager.forward()
        torch_compat.forget_numbers_read(self.fake_mode)
        self.aliases = [self.late.moved(alias, len(self.slots)) for alias in eager.aliases(outputs)]
        pairs = zip(outputs, self.aliases, strict=True)
        made = [output for output, alias in pairs if alias is None and output.requires_grad]
        if not made:
            raise CaptureError(
                f"no output of {type(self.request.model).__name__} is a new tensor that depends on a "
                "parameter or input with a gradient: call it under torch.no_grad(), or let it return its "
                "tensors in tuples, lists, dicts or classes registered with torch.utils._pytree"
            )
        return made

    def step(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """Run the whole step on its tensors; return flat copies of its results."""
        self._mode = EagerNumerics(self._questions, self.sizes, keeps_draws=self.request.options.cuda_graph)
        pairs = zip(self.inputs, flat, strict=True)
        self._mode.give([tensor for item, tensor in pairs if item.role is Role.EXAMPLE])
        with self._mode, torch_compat.saved_tensor_hooks_in_traces():
            held = self._with_gradients(flat)
            before = [torch_compat.layout_in_trace(tensor) for tensor in held]
            with self.late.in_place(self.inputs, flat, self.flat_arguments):
                results = self._step(flat, held)
            after = [torch_compat.layout_in_trace(tensor) for tensor in held]
            refuse_new_layouts(self.inputs, before, after)
            self._mode.draws.end_recomputation()
        self.recomputed = self._mode.recomputed
        return results

    def _step(self, flat: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        examples = [held[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.example_leaves]
        arguments = pytree.tree_unflatten(examples, self.example_spec)
        names = [(step_input.role, step_input.name) for step_input in self.inputs]
        present = dict(zip(names, held, strict=True))
        self.model_copy.put([present[places[0].role, places[0].name] for places in self.slots])
        if self.request.mode is Mode.INFERENCE:
            with torch.no_grad(), self._autocast_cache():
                return self._flatten_outputs(call_with(self.model_copy.model, arguments))
        if self.request.mode is Mode.AUTOGRAD:
            return self._differentiable_pass(flat, held, arguments)
        values = dict(zip(names, flat, strict=True))
        leaves = {
            name: tensor for (role, name), tensor in present.items() if tensor is not values[role, name]
        }
        return self._training_step(values, leaves, arguments)

    def _with_gradients(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the step, those that want a gradient as leaves that do.

        All such parameters, also those that are not trained and in inference: ``matmul`` chooses its kernel
        by it.
        """
        held = list(flat)
        for index, step_input in enumerate(self.inputs):
            role, spec = step_input.role, step_input.spec
            is_leaf = role in (Role.PARAMETER, Role.EXAMPLE) or (
                role in (Role.BUFFER, Role.ATTRIBUTE) and self.request.mode is Mode.AUTOGRAD
            )
            if is_leaf and spec is not None and spec.requires_grad:
                held[index] = flat[index].detach().requires_grad_()
        return held

    def _differentiable_pass(
        self, flat: Sequence[torch.Tensor], held: Sequence[torch.Tensor], arguments: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run forward; return its outputs and the gradients of everything that wants one."""
        wanted = {index: tensor for index, tensor in enumerate(held) if tensor is not flat[index]}
        tangents = [
            tensor
            for step_input, tensor in zip(self.inputs, flat, strict=True)
            if step_input.role is Role.TANGENT
        ]
        with torch.enable_grad(), self._autocast_cache():
            outputs = call_with(self.model_copy.model, arguments)
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor, alias in zip(tensors, self.aliases, strict=True) if alias is None]
        self.differentiable = tuple(leaf.requires_grad for leaf in tensors)
        through = [leaf for leaf in tensors if leaf.requires_grad]
        with self._gradients_made():
            gradients = torch.autograd.grad(through, list(wanted.values()), tangents, allow_unused=True)
        by_index = dict(zip(wanted, gradients, strict=True))
        self.gradients = tuple(index for index, gradient in by_index.items() if gradient is not None)
        self.without_gradient = [
            step_input.name
            for index, step_input in enumerate(self.inputs)
            if step_input.role is Role.PARAMETER and index in by_index and by_index[index] is None
        ]
        for index in self.gradients:
            refuse_sparse(self.inputs[index].name, by_index[index])
        answer = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        kept = [by_index[index].detach().clone() for index in self.gradients]
        return [*self._flatten_outputs(answer), *kept]

    def _training_step(
        self,
        values: Mapping[tuple[Role, str], torch.Tensor],
        leaves: Mapping[str, torch.Tensor],
        arguments: Sequence[Any],
    ) -> list[torch.Tensor]:
        trained, options = self.trained, self.request.options
        *inputs, target = arguments
        with torch.enable_grad(), self._autocast_cache():
            outputs = call_with(self.model_copy.model, inputs)
            loss = share_of_loss(self._loss(outputs, target), options.accumulation_steps)
        if not trained:
            raise CaptureError("the loss depends on no parameter that the optimizer trains")
        wanted = [leaves[name] for name in trained]
        with self._gradients_made():
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            refuse_sparse(name, gradient)
        self.without_gradient = [name for name, own in zip(trained, gradients, strict=True) if own is None]
        with torch.autocast(self.device.type, enabled=False):
            if self.request.runs_in_micro_batches:
                for name, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        values[Role.GRADIENT, name].add_(gradient)
            else:
                if options.changes_gradients:
                    gradients = separated(gradients, wanted)
                self._update(values, dict(zip(trained, gradients, strict=True)))
        answer = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        return self._flatten_outputs((loss.detach(), answer) if options.return_outputs else loss.detach())

    def update(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """Run what follows the last micro-batch; all results are written in place."""
        names = [(step_input.role, step_input.name) for step_input in self.inputs]
        values = dict(zip(names, flat, strict=True))
        gradients = {name: values[Role.GRADIENT, name] for name in self.trained}
        with self._mode, torch.autocast(self.device.type, enabled=False):
            self._update(values, gradients)
        return []

    @contextlib.contextmanager
    def _autocast_cache(self) -> Iterator[None]:
        """Let autocast keep the weights that it has cast, as in eager: their gradients add up cast, too.

        Tracing turns that off.
        """
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self._caches_casts)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)

    @contextlib.contextmanager
    def _gradients_made(self) -> Iterator[None]:
        """Mark what backward traces; turn autocast off, as it keeps to the types of forward and loss."""
        self._mode.draws.end_recomputation()
        self._mode.in_backward = True
        with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            yield
        self._mode.in_backward = False

    def _loss(self, outputs: Any, target: Any) -> torch.Tensor:
        if self.model_copy.loss_fn is None:
            raise CaptureError("a training step needs loss_fn")
        return checked_loss(self.model_copy.loss_fn(outputs, target))

    @property
    def trained(self) -> list[str]:
        """The parameters that are updated, in the optimizer's order."""
        return [name for names in self._layout().parameters for name in names if name in self.state]

    def _layout(self) -> OptimizerLayout:
        if self.layout is None:
            raise CaptureError("a training step needs an optimizer")
        return self.layout

    def _update(
        self,
        values: Mapping[tuple[Role, str], torch.Tensor],
        gradients: Mapping[str, torch.Tensor | None],
    ) -> None:
        if self.request.optimizer is None:
            raise CaptureError("a training step needs an optimizer")
        # In the sequence of ``model.parameters()``, by which a norm is summed up, not in the optimizer's.
        clip([gradients.get(name) for role, name in values if role is Role.PARAMETER], self.request.options)
        scalars: dict[str, Any] = {}
        for slot in self._layout().scalars:
            scalars[slot.name] = values[Role.SCALAR, slot.name].item()
            if slot.parameter is None:
                torch_compat.assume_sign(scalars[slot.name], positive=slot.positive)
        for tensor in self._layout().tensors:
            scalars[tensor.name] = values[Role.HYPERPARAMETER, tensor.name]
        state = {
            name: {key: values[Role.STATE, f"{name}.{key}"] for key in keys}
            for name, keys in self.state.items()
        }
        parameters = {name: tensor for (role, name), tensor in values.items() if role is Role.PARAMETER}
        with self.model_copy.objects.unheard():
            trace_updates(self.request.optimizer, self._layout(), parameters, gradients, state, scalars)

    def _flatten_outputs(self, answer: Any) -> list[torch.Tensor]:
        """Return flat results, each behind a ``clone``, as a functional graph returns none of its arguments.

        The clones are removed again when the graph is cleaned
        (:func:`olla_fx.passes.cleanup.drop_output_copies`).
        """
        leaves, spec = pytree.tree_flatten(answer)
        results: list[torch.Tensor] = []
        layout: list[tuple[bool, Any]] = []
        aliases = iter(self.aliases)
        for leaf in leaves:
            alias = next(aliases, None) if isinstance(leaf, torch.Tensor) else None
            if alias is not None:
                layout.append((False, alias))
            elif isinstance(leaf, torch.Tensor):
                layout.append((True, len(results)))
                results.append(leaf.detach().clone())
            elif isinstance(leaf, int | float | bool | str | type(None) | torch.SymInt | torch.SymFloat):
                layout.append((False, leaf))
            else:
                advice = other_libraries.advice_on(leaf)
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}, which is no tensor, number, tuple, list or "
                    f"dict: {advice or 'register it with torch.utils._pytree, or return its tensors'}"
                )
        self.outputs = OutputLayout(spec, tuple(layout))
        return results


def _at_hints(spec: TensorSpec) -> TensorSpec:
    """Return a description with the symbols' hints in their places."""
    shape, stride = (tuple(map(torch_compat.hint_of, numbers)) for numbers in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)
