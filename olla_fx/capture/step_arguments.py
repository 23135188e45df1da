"""The arguments of a step that is traced: what its graph takes, and the fake tensors in the place of each.

They are, in this order, the tensors of the modules, the optimizer's state and hyper-parameters, the numbers
that are bound late, the tensors of the example, and then, in the caller's own loop, a tangent for each output
that has a gradient (forward runs once on fake tensors to tell which have one), with micro-batches the
gradients that accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.eager import FakeStep
from olla_fx.capture.gradients import micro_batches
from olla_fx.capture.inputs import Constant, HeldNumber, tensor_slots
from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.refusals import explained
from olla_fx.capture.symbols.integers import integers_as_symbols
from olla_fx.capture.symbols.late_numbers import LateTracing
from olla_fx.capture.symbols.sizes import SymbolicSizes
from olla_fx.capture.types import OutputAlias, StepRequest, plan_device
from olla_fx.capture.values.questions import Questions
from olla_fx.capture.varying import layout_in_extents
from olla_fx.errors import CaptureError
from olla_fx.guards import WANTS_GRADIENT, Mode, OptimizerLayout, Role, StepInput, TensorSlot, TensorSpec
from olla_fx.torch_compat import pytree


class StepArguments:
    """The arguments of one tracing run, and the copies of model and loss that they are put into.

    Attributes:
        inputs: what each argument is.
        flat: the arguments: fake tensors.
        fake_mode: of these.
        sizes: the sizes of inputs that are symbols, if any are.
        modules: the user's modules by name.
        slots: the modules' tensors with all their places.
        model_copy: the copies that are traced.
        device: where everything lives.
        layout: of the optimizer.
        state: of the optimizer, by parameter and key.
        late: the numbers that are bound late.
        example_leaves: for each leaf of the example, its index among the arguments, or the constant.
        example_spec: the structure of the example.
        aliases: for each tensor among the outputs of the caller's own loop, the tensor that it is a view of.
    """

    def __init__(self, request: StepRequest, unused: frozenset[str], questions: Questions) -> None:
        """Make the arguments.

        Args:
            request: what to trace.
            unused: parameters not to train.
            questions: answers what is asked of the inputs.
        """
        self._request = request
        self._questions = questions
        self._unused = unused
        self.fake_mode = torch_compat.new_fake_mode()
        symbols = request.symbols
        self.sizes = (
            None
            if symbols.varying is None
            else SymbolicSizes(symbols.varying, self.fake_mode, has_counts=symbols.counts)
        )
        self.modules = request.modules()
        self.slots = tensor_slots(self.modules)
        self.model_copy = ModelCopy(request, self.slots)
        self.inputs: list[StepInput] = []
        self.flat: list[torch.Tensor] = []
        self.aliases: Sequence[OutputAlias | None] = ()
        self.layout: OptimizerLayout | None = None
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.device = plan_device(request, self.slots)
        self._add_model_tensors()
        if request.optimizer is not None:
            self._add_optimizer(request.optimizer)
        self.late = LateTracing(request, self.model_copy, self.fake_mode)
        self.late.add_inputs(self.inputs, self.flat)
        self._add_examples()
        if request.mode is Mode.AUTOGRAD:
            self._add_tangents()
        if request.runs_in_micro_batches:
            self._add_gradients()

    @property
    def trained(self) -> list[str]:
        """The parameters that are updated, in the optimizer's order.

        Raises:
            CaptureError: if there is no optimizer.
        """
        if self.layout is None:
            raise CaptureError("a training step needs an optimizer")
        return [name for names in self.layout.parameters for name in names if name in self.state]

    def _tensor(self, slot: TensorSlot) -> torch.Tensor:
        tensor: torch.Tensor = slot.table(self.modules[slot.owner])[slot.key]
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
        self.flat.append(fake)
        return fake

    def _add_model_tensors(self) -> None:
        for places in self.slots:
            tensor = self._tensor(places[0])
            self._add(places[0].role, places[0].name, TensorSpec.of(tensor))

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizers.check_supported(optimizer)
        self.layout = optimizers.describe(optimizer, self.modules)
        trained = {item.name: item for item in self.inputs if item.role is Role.PARAMETER}
        for index, names in enumerate(self.layout.parameters):
            group = optimizer.param_groups[index]
            for name, parameter in zip(names, group["params"], strict=True):
                spec = trained[name].spec
                if parameter.is_complex():
                    raise CaptureError(f"parameter {name} is complex; training those cannot be captured yet")
                if spec is not None and spec.requires_grad and name not in self._unused:
                    self.state[name] = self._add_state(optimizer, group, name, parameter)
        for slot in self.layout.scalars:
            with self.fake_mode:
                self.flat.append(torch.empty((), dtype=torch.float64))
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
        leaves, self.example_spec = pytree.tree_flatten(self._request.inputs)
        self.example_leaves: list[Any] = []
        first = micro_batches(leaves, self._request.options.accumulation_steps)[0]
        symbolic = iter(self._symbolic_examples())
        numbers = self._request.numbers or {}
        for index, (leaf, part) in enumerate(zip(leaves, first, strict=True)):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and self._request.mode is Mode.TRAINING:
                    raise CaptureError(f"input {index} {WANTS_GRADIENT}")
                batch = None if part is leaf else TensorSpec.of(leaf)
                self._add(Role.EXAMPLE, str(index), TensorSpec.of(part), batch, next(symbolic, None))
                self.example_leaves.append(len(self.flat) - 1)
            else:
                is_held = str(index) in numbers
                self.example_leaves.append(HeldNumber(numbers, str(index)) if is_held else Constant(leaf))

    def _symbolic_examples(self) -> list[torch.Tensor]:
        """Return stand-ins with symbolic sizes for the tensors of the example, if some sizes are symbols."""
        if self.sizes is None:
            return []
        leaves = [leaf for leaf in pytree.tree_leaves(self._request.inputs) if isinstance(leaf, torch.Tensor)]
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
        sizes, seen = self.sizes, self._request.symbols.tangents_seen
        # Nobody knows beforehand which extents follow from counts.
        is_symbolic = sizes is not None and (seen is None or seen.has_views or self._request.symbols.counts)
        made = self._outputs_made(is_symbolic=is_symbolic)
        shapes: list[Any] = [output.shape for output in made]
        if sizes is not None and seen is not None and not is_symbolic:
            extents = seen.extents(sizes.varying.hints, shapes)
            if extents is None:
                made = self._outputs_made(is_symbolic=True)
                shapes = [output.shape for output in made]
            else:
                shapes = [tuple(extent.of(sizes.sizes) for extent in shape) for shape in extents]
        strides: Sequence[Any] = self._request.tangent_strides or [output.stride() for output in made]
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
        eager = FakeStep(self._request, *given, questions=self._questions)
        with (
            explained(self._request.model),
            torch.random.fork_rng(devices=[]),
            self._questions.unnoted(),
            integers_as_symbols(self._request.symbols.askers if is_symbolic else ()),
        ):
            outputs = eager.forward()
        torch_compat.forget_numbers_read(self.fake_mode)
        self.aliases = [self.late.moved(alias, len(self.slots)) for alias in eager.aliases(outputs)]
        pairs = zip(outputs, self.aliases, strict=True)
        made = [output for output, alias in pairs if alias is None and output.requires_grad]
        if not made:
            raise CaptureError(
                f"no output of {type(self._request.model).__name__} is a new tensor that depends on a "
                "parameter or input with a gradient: call it under torch.no_grad(), or let it return its "
                "tensors in tuples, lists, dicts or classes registered with torch.utils._pytree"
            )
        return made


def _at_hints(spec: TensorSpec) -> TensorSpec:
    """Return a description with the symbols' hints in their places."""
    shape, stride = (tuple(map(torch_compat.hint_of, numbers)) for numbers in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)
