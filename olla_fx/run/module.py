"""The module that a user calls: their model's step, planned.

It shares the model's parameters, buffers and ``state_dict`` keys. Every call looks its inputs up by name.
There is a plan for each kind of call (shapes and types of the inputs and, in the caller's own loop, whether
gradients are wanted and which modules train); where model or optimizer changed in a way that a plan depends
on, the step is planned again, unless a plan was made for that state before. All plans run in one buffer,
sized by the largest.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import Mode, StepRequest, TensorSpec
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.eager import eager_baseline
from olla_fx.errors import StepModeError
from olla_fx.guards import Prologue
from olla_fx.plan import Plan
from olla_fx.report import StepReport
from olla_fx.run.autograd import Pass, PlannedFunction
from olla_fx.run.calls import (
    call_key,
    call_kind,
    check_training_flag,
    in_sequence,
    refuse_transforms,
    shows_the_model,
)
from olla_fx.run.cuda_graph import GraphedStep, check_graph_request
from olla_fx.run.executor import Binding, RunCounts
from olla_fx.run.pickling import carried, refuse_unnamed
from olla_fx.run.plan_cache import CompiledStep, KeptPlan, KeptPlans
from olla_fx.run.repetition import AnotherPlan, Repetition, Strides, TangentLayouts
from olla_fx.run.shared_buffer import Lease, SharedBuffer
from olla_fx.torch_compat import pytree

logger = logging.getLogger(__name__)

MOST_PLANS = 8
"""Plans that a module keeps; the one that was not used for longest goes first."""


Compile = Callable[[StepRequest, SharedBuffer], CompiledStep]


class PlannedModule(nn.Module):
    """A planned step.

    Attributes:
        replans: how often a step was planned again because model or optimizer changed.
        stock_runs: how many calls ran with the stock allocator because the buffer held the activations of
            a forward whose backward was still to come.
    """

    _model: nn.Module
    _request: StepRequest
    _current: KeptPlan

    def __init__(
        self,
        request: StepRequest,
        compile_step: Compile,
        most_plans: int = MOST_PLANS,
        cuda_graph: bool = False,
    ) -> None:
        """Plan the step; runs nothing on real data.

        Args:
            request: what to plan.
            compile_step: captures and plans a request.
            most_plans: how many plans to keep.
            cuda_graph: whether to launch settled steps as CUDA graphs.
        """
        super().__init__()
        self._plans = KeptPlans(most_plans)
        model = request.model
        # The very dictionaries of the model: parameters, state_dict and .to() are the model's own.
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self.training = model.training
        # Kinds of the example, not the example: a batch is large.
        self._example = pytree.tree_map_only(torch.Tensor, TensorSpec.of, request.inputs)
        self._request = replace(request, inputs=())
        self._compile = compile_step
        self._cuda_graph = cuda_graph
        self._lock = threading.RLock()
        self._buffer = SharedBuffer()
        self.replans = 0
        self.stock_runs = 0
        if request.mode is Mode.AUTOGRAD:
            request = replace(request, mode=call_kind(model, request.mode, request.inputs)[0])
        key, _ = call_key(self._request.mode, request.inputs)
        self._current = self._plan_step(key, request)
        # Not as a child module: that would change the keys of state_dict. Last, since from here on
        # attributes that the model has are set there.
        object.__setattr__(self, "_model", model)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run one step, or in the caller's own loop one forward.

        Args:
            inputs: the model's inputs, for a whole training step the target last.
            named: inputs by name, as the model's own forward takes them; not for a whole training step.

        Returns:
            The model's outputs; for a whole training step the loss, or ``(loss, outputs)`` with
            ``return_outputs``.

        Raises:
            CaptureError: when the step cannot be captured for inputs of a new kind.
            StepInputError: when the inputs cannot be used.
            StepModeError: when the model is in the other mode.
        """
        if self._request.mode is not Mode.TRAINING and shows_the_model():
            return self._model(*inputs, **named)
        return self._run_call(inputs, named)

    @torch_compat.not_compiled
    def _run_call(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._request.mode is Mode.TRAINING:
            refuse_transforms()
        if named:
            inputs = in_sequence(self._model, self._request.mode, inputs, named)
        check_training_flag(self._model, self._request.mode)
        with self._lock:
            planned, values = self._planned_for(inputs)
            self._current = planned
            if self._request.mode is Mode.TRAINING:
                try:
                    return self._train(planned, values)
                except BaseException:
                    planned.prologue.undo_created_state()
                    raise
        if planned.step.captured.mode is Mode.AUTOGRAD:
            return self._differentiate(planned, inputs, values)
        return self._infer(planned, values)

    def _planned_for(self, inputs: tuple[Any, ...]) -> tuple[KeptPlan, list[Any]]:
        """Return the plan of a call, made now if none fits, and the values of its placeholders."""
        key, examples = call_key(self._request.mode, inputs)
        fitting = self._plans.fitting(key, examples)
        if isinstance(fitting, tuple):
            return fitting
        kind = call_kind(self._model, self._request.mode, inputs)
        reason = fitting.get(kind)
        if reason is None:
            # Another plan knows which parameters the optimizer is to hold by now.
            self._current.prologue.adopt_parameters()
        lost = self._plans.drop_lost()
        self.replans += lost or reason is not None
        logger.info("planning %s", f"again: {reason}" if reason else "for a new kind of call")
        planned = self._plan_step(key, replace(self._request, inputs=inputs, mode=kind[0]))
        return planned, planned.prologue.gather(examples)

    def _plan_step(self, key: Hashable, request: StepRequest, instead_of: KeptPlan | None = None) -> KeptPlan:
        step = self._compile(request, self._buffer)
        example = pytree.tree_map_only(torch.Tensor, TensorSpec.of, request.inputs)
        graphed = None
        if self._cuda_graph:
            check_graph_request(request, step.captured.device)
            graphed = GraphedStep(step.captured, step.executor)
        layouts = TangentLayouts.of(step.captured, seen=bool(request.tangent_strides))
        own = self._request
        prologue = Prologue(
            step.captured,
            own.model,
            own.loss_fn,
            own.optimizer,
            optimizers.initial_state,
            differentiates=own.mode is Mode.AUTOGRAD and torch.is_grad_enabled(),
        )
        kind = call_kind(own.model, own.mode, request.inputs)
        planned = KeptPlan(key, kind, step, prologue, example, graphed, layouts)
        self._plans.keep(planned, instead_of)
        return planned

    def _train(self, planned: KeptPlan, values: list[Any]) -> Any:
        results = self._run(planned, self._buffer.lease(wait=True), values)
        optimizer = self._request.optimizer
        if optimizer is not None:
            torch_compat.note_optimizer_stepped(optimizer)
            torch_compat.run_optimizer_post_hooks(optimizer)
        return planned.step.captured.outputs.rebuild(results)

    def _infer(self, planned: KeptPlan, values: list[Any]) -> Any:
        return planned.step.captured.outputs.rebuild(self._run(planned, self._lease(), values))

    @staticmethod
    def _run(planned: KeptPlan, lease: Lease | None, values: list[Any]) -> Any:
        if planned.graphed is not None:
            return planned.graphed.run(lease, values)
        return planned.step.executor.start(lease).run_phase(0, values)

    def _differentiate(self, planned: KeptPlan, inputs: tuple[Any, ...], values: list[Any]) -> Any:
        captured, repetition = planned.step.captured, None
        if not planned.layouts.are_known:
            plan_again = partial(self._planned_for_tangents, planned, inputs)
            repetition = Repetition(planned.layouts, captured, values, plan_again)
        running = Pass(captured, planned.step.executor.start(self._lease()), values, repetition)
        results = PlannedFunction.apply(running, *running.differentiable())  # type: ignore[no-untyped-call]
        return captured.outputs.rebuild(results, values)

    def _planned_for_tangents(
        self, planned: KeptPlan, inputs: tuple[Any, ...], strides: Strides
    ) -> AnotherPlan | None:
        """The plan for tangents of other layouts; None where the model is no longer as it was planned for."""
        captured = planned.step.captured
        enabled, dtype, cached = captured.autocast
        autocast = torch.autocast(captured.device.type, dtype, enabled, cache_enabled=cached)
        with self._lock, autocast, torch.enable_grad():
            key, examples = call_key(self._request.mode, inputs)
            # What fits the model as it is now might be the plan for another state than forward has seen.
            if key != planned.key or planned.prologue.why_not() is not None:
                return None
            fitting = self._plans.fitting(key, examples)
            present = fitting[0] if isinstance(fitting, tuple) else None
            if present is not None and present is not planned:
                if present.step.captured.tangent_strides == strides:
                    return self._another(present, inputs)
                if not captured.tangents_overlap:
                    return None
            latest = present or planned
            if latest is planned or latest.step.captured.tangents_overlap:
                # Layouts that change once more are left as the outputs have them.
                wanted = () if latest.layouts.were_seen else strides
                request = replace(self._request, inputs=inputs, mode=captured.mode, tangent_strides=wanted)
                latest = self._current = self._plan_step(key, request, instead_of=latest)
                settled = not wanted and not latest.step.captured.tangents_overlap
                latest.layouts.are_known |= settled
            return self._another(latest, inputs)

    def _another(self, planned: KeptPlan, inputs: tuple[Any, ...]) -> AnotherPlan:
        step, layouts = planned.step, planned.layouts
        again = partial(self._planned_for_tangents, planned, inputs)
        return AnotherPlan(step.captured, layouts, lambda: step.executor.start(self._lease()), again)

    def _lease(self) -> Lease | None:
        """A claim on the buffer; None, counted, while it holds what a backward still needs."""
        lease = self._buffer.lease(wait=self._request.mode is not Mode.AUTOGRAD)
        if lease is None:
            self.stock_runs += 1
        return lease

    @property
    def plan(self) -> Plan:
        """The plan of the last kind of call: with workspaces from the second call on."""
        step = self._current.step
        return step.describe(step.executor)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The reordered graph in force, of forward alone in the caller's own loop; print its ``code``."""
        return self._current.step.executor.phases[0]

    @property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """The graphs of all phases: in the caller's own loop forward and backward."""
        return self._current.step.executor.phases

    @property
    def binding(self) -> Binding:
        """Whether arrays live in the buffer or with the stock allocator."""
        return self._current.step.executor.binding

    @property
    def counts(self) -> RunCounts:
        """Allocation requests of the last complete run in the buffer."""
        return self._current.step.executor.counts

    @property
    def outside_log(self) -> tuple[str, ...]:
        """The last run's unexpected requests, for finding out why one was not served."""
        return self._current.step.executor.outside_log

    @property
    def graphed(self) -> GraphedStep | None:
        """With ``cuda_graph=True``: how many graphs were captured and replayed, or why none is."""
        return self._current.graphed

    @property
    def is_busy(self) -> bool:
        """Whether the buffer holds the activations of a forward whose backward is still to come."""
        return self._buffer.is_busy

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite the buffer between two calls; the next call must not notice.

        Args:
            byte: what every byte becomes.

        Raises:
            StepModeError: while the buffer holds what a backward still needs.
        """
        if self._buffer.is_busy:
            raise StepModeError("the buffer holds activations that a backward still needs")
        self._buffer.poison(byte)

    def report(self) -> StepReport:
        """What the plan saves and how the last call was served, as a table when printed.

        Eager's need is followed under fake tensors, without the kernels' workspaces.
        """
        inputs = pytree.tree_map_only(TensorSpec, _on_meta, self._current.example)
        mode = self._current.step.captured.mode
        baseline = eager_baseline(replace(self._request, inputs=inputs, mode=mode))
        return StepReport(replace(self.plan, baseline=baseline), self.binding, self.counts)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model has: its ``config``, or a method of its own, which runs in eager."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is: on the model, if the model has it."""
        model = self.__dict__.get("_model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """A planned module of copies of model, loss and optimizer; plans for itself."""
        old = self._request
        model, loss_fn, optimizer = copy.deepcopy((old.model, old.loss_fn, old.optimizer), memo)
        request = replace(old, model=model, loss_fn=loss_fn, optimizer=optimizer)
        remade = _remade(request, self._example, self._compile, self._plans.limit, self._cuda_graph)
        memo[id(self)] = remade
        remade.__dict__.update(copy.deepcopy(carried(self), memo))
        return remade

    def __reduce__(self) -> Any:
        """Pickled are model, loss, optimizer and options; plans are made again, or found on disk."""
        refuse_unnamed(self._request.loss_fn)
        arguments = self._request, self._example, self._compile, self._plans.limit, self._cuda_graph
        return _remade, arguments, carried(self)

    def train(self, mode: bool = True) -> PlannedModule:
        """Set the model's training flag; see ``nn.Module.train``."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PlannedModule:
        self._model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; see ``nn.Module.state_dict``."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; see ``nn.Module.load_state_dict``."""
        return self._model.load_state_dict(*args, **kwargs)


def _remade(
    request: StepRequest, example: Any, compile_step: Compile, most_plans: int, cuda_graph: bool
) -> PlannedModule:
    """A planned module from the kinds of its example's tensors."""
    inputs = pytree.tree_map_only(TensorSpec, _stand_in, example)
    return PlannedModule(replace(request, inputs=inputs), compile_step, most_plans, cuda_graph)


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    stand_in = replace(spec, device=torch.device("meta")).empty(meta_as=torch.device("meta"))
    return stand_in.requires_grad_(spec.requires_grad)


def _stand_in(spec: TensorSpec) -> torch.Tensor:
    return spec.empty(meta_as=spec.device).requires_grad_(spec.requires_grad)
