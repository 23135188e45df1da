"""One tracing run: the step as a function of its arguments.

The function calls the model, the loss, ``torch.autograd.grad`` and the optimizer's own ``step`` on copies of
the user's objects that hold its arguments (:mod:`olla_fx.capture.step_arguments`). With
``accumulation_steps`` it is a function of one micro-batch, which adds its gradients to tensors that it is
given; the update from these is a function of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture.arguments import call_with
from olla_fx.capture.eager_numerics import EagerNumerics
from olla_fx.capture.gradients import checked_loss, clip, refuse_sparse, separated, share_of_loss
from olla_fx.capture.refusals import refuse_new_layouts
from olla_fx.capture.step_arguments import StepArguments
from olla_fx.capture.types import OutputLayout, StepRequest
from olla_fx.capture.updates import trace_updates
from olla_fx.capture.values.questions import Questions
from olla_fx.errors import CaptureError
from olla_fx.guards import NO_WRITES, Mode, Reads, Role, other_libraries
from olla_fx.torch_compat import pytree


class Tracing:
    """One tracing run of a request.

    Attributes:
        request: what is traced.
        arguments: what the step is a function of; its parameters that no gradient reaches are not trained.
        reads: what the traced code read of modules, once traced.
        outputs: how results become the answer, once traced.
        writes: what the model wrote on its Python attributes, once traced.
        without_gradient: parameters that no gradient reached, once traced.
        differentiable: for each result of the answer, True if a tangent comes back for it, once traced.
        gradients: indices of the inputs whose gradients follow the answer, once traced.
        recomputed: the number of operators that checkpoints run again, once traced.
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
        self._caches_casts = torch.is_autocast_cache_enabled()
        self.arguments = StepArguments(request, unused, questions)
        self.reads: Mapping[tuple[int, str], nn.Module] = {}
        self.outputs: OutputLayout | None = None
        self.writes = NO_WRITES
        self.without_gradient: list[str] = []
        self.differentiable: tuple[bool, ...] = ()
        self.gradients: tuple[int, ...] = ()
        self.recomputed = 0

    def baked_values(self) -> Reads:
        """Return what the traced code read of its modules, as the user's own modules have it."""
        own, model_copy = self.arguments.modules, self.arguments.model_copy
        copies = {id(copy): (name, own[name]) for name, copy in model_copy.modules.items()}
        known = frozenset((slot.owner, slot.key) for places in self.arguments.slots for slot in places)
        request, objects = self.request, model_copy.objects
        read = objects.fields(), objects.functions
        reads = Reads.of(self.reads, copies, known, request.loss_fn, request.numbers, *read)
        return replace(reads, late=self.arguments.late.binding())

    def step(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """Run the whole step on its tensors; return flat copies of its results."""
        arguments = self.arguments
        keeps_draws = self.request.options.cuda_graph
        self._mode = EagerNumerics(self._questions, arguments.sizes, keeps_draws=keeps_draws)
        pairs = zip(arguments.inputs, flat, strict=True)
        self._mode.give([tensor for item, tensor in pairs if item.role is Role.EXAMPLE])
        with self._mode, torch_compat.saved_tensor_hooks_in_traces():
            held = self._with_gradients(flat)
            before = [torch_compat.layout_in_trace(tensor) for tensor in held]
            with arguments.late.in_place(arguments.inputs, flat, arguments.flat):
                results = self._step(flat, held)
            after = [torch_compat.layout_in_trace(tensor) for tensor in held]
            refuse_new_layouts(arguments.inputs, before, after)
            self._mode.draws.end_recomputation()
        self.recomputed = self._mode.recomputed
        return results

    def _step(self, flat: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arguments = self.arguments
        examples = [held[leaf] if isinstance(leaf, int) else leaf.value for leaf in arguments.example_leaves]
        given = pytree.tree_unflatten(examples, arguments.example_spec)
        names = [(step_input.role, step_input.name) for step_input in arguments.inputs]
        present = dict(zip(names, held, strict=True))
        arguments.model_copy.put([present[places[0].role, places[0].name] for places in arguments.slots])
        if self.request.mode is Mode.INFERENCE:
            with torch.no_grad(), self._autocast_cache():
                return self._flatten_outputs(call_with(arguments.model_copy.model, given))
        if self.request.mode is Mode.AUTOGRAD:
            return self._differentiable_pass(flat, held, given)
        values = dict(zip(names, flat, strict=True))
        leaves = {
            name: tensor for (role, name), tensor in present.items() if tensor is not values[role, name]
        }
        return self._training_step(values, leaves, given)

    def _with_gradients(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the step, those that want a gradient as leaves that do.

        All such parameters, also those that are not trained and in inference: ``matmul`` chooses its kernel
        by it.
        """
        held = list(flat)
        for index, step_input in enumerate(self.arguments.inputs):
            role, spec = step_input.role, step_input.spec
            is_leaf = role in (Role.PARAMETER, Role.EXAMPLE) or (
                role in (Role.BUFFER, Role.ATTRIBUTE) and self.request.mode is Mode.AUTOGRAD
            )
            if is_leaf and spec is not None and spec.requires_grad:
                held[index] = flat[index].detach().requires_grad_()
        return held

    def _differentiable_pass(
        self, flat: Sequence[torch.Tensor], held: Sequence[torch.Tensor], given: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run forward; return its outputs and the gradients of everything that wants one."""
        wanted = {index: tensor for index, tensor in enumerate(held) if tensor is not flat[index]}
        inputs, aliases = self.arguments.inputs, self.arguments.aliases
        tangents = [
            tensor for step_input, tensor in zip(inputs, flat, strict=True) if step_input.role is Role.TANGENT
        ]
        with torch.enable_grad(), self._autocast_cache():
            outputs = call_with(self.arguments.model_copy.model, given)
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor, alias in zip(tensors, aliases, strict=True) if alias is None]
        self.differentiable = tuple(leaf.requires_grad for leaf in tensors)
        through = [leaf for leaf in tensors if leaf.requires_grad]
        with self._gradients_made():
            gradients = torch.autograd.grad(through, list(wanted.values()), tangents, allow_unused=True)
        by_index = dict(zip(wanted, gradients, strict=True))
        self.gradients = tuple(index for index, gradient in by_index.items() if gradient is not None)
        self.without_gradient = [
            step_input.name
            for index, step_input in enumerate(inputs)
            if step_input.role is Role.PARAMETER and index in by_index and by_index[index] is None
        ]
        for index in self.gradients:
            refuse_sparse(inputs[index].name, by_index[index])
        answer = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        kept = [by_index[index].detach().clone() for index in self.gradients]
        return [*self._flatten_outputs(answer), *kept]

    def _training_step(
        self,
        values: Mapping[tuple[Role, str], torch.Tensor],
        leaves: Mapping[str, torch.Tensor],
        given: Sequence[Any],
    ) -> list[torch.Tensor]:
        trained, options = self.arguments.trained, self.request.options
        *inputs, target = given
        with torch.enable_grad(), self._autocast_cache():
            outputs = call_with(self.arguments.model_copy.model, inputs)
            loss = share_of_loss(self._loss(outputs, target), options.accumulation_steps)
        if not trained:
            raise CaptureError("the loss depends on no parameter that the optimizer trains")
        wanted = [leaves[name] for name in trained]
        with self._gradients_made():
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            refuse_sparse(name, gradient)
        self.without_gradient = [name for name, own in zip(trained, gradients, strict=True) if own is None]
        with torch.autocast(self.arguments.device.type, enabled=False):
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
        names = [(step_input.role, step_input.name) for step_input in self.arguments.inputs]
        values = dict(zip(names, flat, strict=True))
        gradients = {name: values[Role.GRADIENT, name] for name in self.arguments.trained}
        with self._mode, torch.autocast(self.arguments.device.type, enabled=False):
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
        with torch.enable_grad(), torch.autocast(self.arguments.device.type, enabled=False):
            yield
        self._mode.in_backward = False

    def _loss(self, outputs: Any, target: Any) -> torch.Tensor:
        loss_fn = self.arguments.model_copy.loss_fn
        if loss_fn is None:
            raise CaptureError("a training step needs loss_fn")
        return checked_loss(loss_fn(outputs, target))

    def _update(
        self,
        values: Mapping[tuple[Role, str], torch.Tensor],
        gradients: Mapping[str, torch.Tensor | None],
    ) -> None:
        optimizer, layout = self.request.optimizer, self.arguments.layout
        if optimizer is None or layout is None:
            raise CaptureError("a training step needs an optimizer")
        # In the sequence of ``model.parameters()``, by which a norm is summed up, not in the optimizer's.
        clip([gradients.get(name) for role, name in values if role is Role.PARAMETER], self.request.options)
        scalars: dict[str, Any] = {}
        for slot in layout.scalars:
            scalars[slot.name] = values[Role.SCALAR, slot.name].item()
            if slot.parameter is None:
                torch_compat.assume_sign(scalars[slot.name], positive=slot.positive)
        for tensor in layout.tensors:
            scalars[tensor.name] = values[Role.HYPERPARAMETER, tensor.name]
        state = {
            name: {key: values[Role.STATE, f"{name}.{key}"] for key in keys}
            for name, keys in self.arguments.state.items()
        }
        parameters = {name: tensor for (role, name), tensor in values.items() if role is Role.PARAMETER}
        with self.arguments.model_copy.objects.unheard():
            trace_updates(optimizer, layout, parameters, gradients, state, scalars)

    def _flatten_outputs(self, answer: Any) -> list[torch.Tensor]:
        """Return flat results, each behind a ``clone``, as a functional graph returns none of its arguments.

        The clones are removed again when the graph is cleaned
        (:func:`olla_fx.passes.cleanup.drop_output_copies`).
        """
        leaves, spec = pytree.tree_flatten(answer)
        results: list[torch.Tensor] = []
        layout: list[tuple[bool, Any]] = []
        aliases = iter(self.arguments.aliases)
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
