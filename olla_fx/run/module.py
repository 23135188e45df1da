"""The module that a user calls: their model's step, planned.

It shares the model's parameters, buffers and ``state_dict`` keys. Every call looks its inputs up by name,
and its plan (:mod:`olla_fx.run.plans`); without one the model itself runs. Planned modules share the
buffers of a device's pool; a module holds one at most.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import CapturedStep, Mode, StepRequest, TensorSpec
from olla_fx.capture.arguments import in_sequence
from olla_fx.capture.values.questions import known_answers
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.eager.record import Recording
from olla_fx.errors import StepInputError, StepModeError
from olla_fx.link import poison_host_memory
from olla_fx.run.autograd import Pass, PlannedFunction
from olla_fx.run.calls import Call, check_training_flag, refuse_transforms, shows_the_model
from olla_fx.run.container import ContainerMethods
from olla_fx.run.eager_step import run_in_eager
from olla_fx.run.executor import Executor
from olla_fx.run.micro_batches import run_micro_batches
from olla_fx.run.pickling import carried, refuse_unnamed
from olla_fx.run.plan_cache import CachedPlan, Strides
from olla_fx.run.plans import Plans
from olla_fx.run.pool import Lease, Turn, pool_of
from olla_fx.run.shown_forward import SHOWN, ShownForward, shown_as
from olla_fx.run.stats import StepReport, StepStats, report_on
from olla_fx.step_plan import Plan
from olla_fx.time_limit import TimeLimit
from olla_fx.torch_compat import pytree


class PlannedModule(ContainerMethods, nn.Module):
    """A planned step; :func:`olla_fx.optimize` makes it.

    It stands for the model: the model's own attributes are found on it, and it is an instance of the model's
    class, too. Its own names are few: ``plan``, ``graph_module``, ``stats``,
    :meth:`report`, :meth:`replan` and :meth:`poison`.
    """

    _model: nn.Module
    _request: StepRequest
    _plans: Plans

    def __init__(self, request: StepRequest) -> None:
        """Plan the step; runs nothing on real data.

        Args:
            request: what to plan.
        """
        super().__init__()
        model = request.model
        # The very dictionaries of the model: parameters, state_dict and .to() are the model's own.
        torch_compat.share_tables(self, model)
        self.training = model.training
        # Kinds of the example, not the example: a batch is large.
        self._example = pytree.tree_map_only(torch.Tensor, TensorSpec.of, request.inputs)
        self._request = replace(request, inputs=(), answers={})
        self._lock = threading.RLock()
        self._turn = Turn()
        self._plans = Plans(request)
        self._answers = known_answers(self._plans.current.executor.step.captured.questions)
        if request.mode is not Mode.TRAINING:
            self.__dict__[SHOWN] = shown_as(PlannedModule.forward, model.forward)
        # Not as a child module: that would change the keys of state_dict. Last, since from here on
        # attributes that the model has are set there.
        object.__setattr__(self, "_model", model)

    @property
    def _shown_class(self) -> type:
        model = self.__dict__.get("_model")
        return type(self) if model is None else model.__class__

    @_shown_class.setter
    def _shown_class(self, kind: type) -> None:
        self._model.__class__ = kind

    # Libraries choose by isinstance, and by the names and signatures of the class.
    __class__ = _shown_class

    @ShownForward
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run one step, or in the caller's own loop one forward.

        Args:
            inputs: the model's inputs, for a whole training step the target last.
            named: inputs by name, as the model's own forward takes them; not for a whole training step.

        Returns:
            The model's outputs; for a whole training step the loss, or ``(loss, outputs)`` with
            ``return_outputs``.

        Raises:
            CaptureError: if the step cannot be captured for inputs of a new kind.
            StepInputError: if the inputs cannot be used.
            StepModeError: if the model is in the other mode.
        """
        if self._request.mode is not Mode.TRAINING and shows_the_model():
            return torch_compat.call_itself(self._model, *inputs, **named)
        return self._run_call(inputs, named)

    @torch_compat.not_compiled
    def _run_call(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._request.mode is Mode.TRAINING:
            refuse_transforms()
        check_training_flag(self._model, self._request.mode)
        is_beside = self._is_beside_a_run()
        if is_beside and self._plans.all_save_little():
            return self._run_beside(inputs, named)
        try:
            call = Call.of(self._request.mode, self._in_sequence(inputs, named))
        except StepInputError as error:
            is_misuse = named and self._request.mode is Mode.TRAINING
            if is_misuse or not self._plans.falls_back:
                raise
            self._plans.note_refusal(error)
            return run_in_eager(self._request, inputs, named)
        if is_beside and self._plans.saves_little(call):
            return self._run_beside(inputs, named)
        # Every plan of the call may be made again after its run.
        plans = 2 if self._request.runs_in_micro_batches else 1
        limit = TimeLimit(self._request.options.time_limit, plans)
        if self._request.mode is Mode.TRAINING:
            with self._lock:
                return self._train(call, limit)
        with self._lock:
            fitting = self._plans.of(call, limit)
            if fitting is not None:
                planned, values = fitting
                executor = planned.executor
                if executor.step.captured.mode is Mode.AUTOGRAD:
                    sees_gradients = _has_gradient(executor.step.captured, values)
                    planned.choose_executor(sees_gradients, limit)
                    executor = planned.executor
        if fitting is None:
            return run_in_eager(self._request, inputs, named)
        if executor.step.captured.mode is Mode.AUTOGRAD:
            return self._differentiate(planned, executor, values, sees_gradients)
        return self._infer(planned, values, limit)

    def _is_beside_a_run(self) -> bool:
        """Return True if a run holds the module's buffer, so that a call may take less time in eager."""
        is_held = self._request.mode is not Mode.TRAINING and self._turn.is_taken
        return is_held and self._plans.falls_back

    def _run_beside(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._plans.beside_runs += 1
        return run_in_eager(self._request, inputs, named)

    def _in_sequence(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if not named:
            return inputs
        if self._request.mode is Mode.TRAINING:
            raise StepInputError(
                "a whole training step takes its inputs in sequence, the target last, not by name "
                f"({next(iter(named))}=)"
            )
        return in_sequence(self._model, inputs, named)

    def _train(self, call: Call, limit: TimeLimit) -> Any:
        fitting = self._plans.of(call, limit)
        if fitting is None:
            return run_in_eager(self._request, call.inputs)
        planned, values = fitting
        try:
            return self._train_planned(planned, values, limit)
        except BaseException:
            planned.prologue.undo_created_state()
            raise

    def _train_planned(self, planned: CachedPlan, values: list[Any], limit: TimeLimit) -> Any:
        def run(part: CachedPlan, values: list[Any]) -> Any:
            return self._run(part, self._turn.lease(wait=True), values, limit)

        if planned.update is None:
            results = run(planned, values)
            answer = planned.executor.step.captured.outputs.rebuild(results)
        else:
            answer = run_micro_batches(planned, planned.update, values, run)
        optimizer = self._request.optimizer
        if optimizer is not None:
            torch_compat.note_optimizer_stepped(optimizer)
            torch_compat.run_optimizer_post_hooks(optimizer)
        return answer

    def _infer(self, planned: CachedPlan, values: list[Any], limit: TimeLimit) -> Any:
        results = self._run(planned, self._lease(), values, limit)
        return planned.executor.step.captured.outputs.rebuild(results)

    @staticmethod
    def _run(planned: CachedPlan, lease: Lease | None, values: list[Any], limit: TimeLimit) -> Any:
        if planned.graphed is not None:
            return planned.graphed.run(lease, values, limit)
        return planned.executor.start(lease, limit).run_phase(0, values)

    def _differentiate(
        self, planned: CachedPlan, executor: Executor, values: list[Any], sees_gradients: bool
    ) -> Any:
        plans = self._plans

        def note_backward(strides: Strides, suited: GradientsInBuffer) -> None:
            plans.note_gradient_strides(planned, strides)
            planned.suited[sees_gradients] = suited

        # Its backward, after which the step may be planned again, is a call of its own.
        run = executor.start(self._lease())
        running = Pass(run, values, note_backward)
        results = torch_compat.applied(PlannedFunction, running, *running.differentiable())
        return run.step.captured.outputs.rebuild(results, values)

    def _lease(self) -> Lease | None:
        """Take the module's turn in a buffer; None, counted, while one holds what a backward still needs."""
        lease = self._turn.lease(wait=self._request.mode is not Mode.AUTOGRAD)
        if lease is None:
            self._plans.stock_runs += 1
        return lease

    @property
    def plan(self) -> Plan:
        """The plan of the last kind of call: with workspaces from the second call on."""
        return self._plans.current.plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The reordered graph in force, of forward alone in the caller's own loop; print its ``code``."""
        return self._plans.current.executor.step.emitted.phases[0]

    @property
    def stats(self) -> StepStats:
        """The statistics of all calls so far."""
        current = self._plans.current
        return StepStats(
            binding=current.executor.step.binding,
            counts=current.counts,
            outside_log=current.outside_log,
            graph_modules=current.graph_modules,
            graphed=current.graphed,
            replans=self._plans.replans,
            stock_runs=self._plans.stock_runs,
            eager_runs=self._plans.new_kinds.eager_calls + self._plans.beside_runs,
            is_busy=self._turn.is_taken,
            cached_plans=len(self._plans),
            families=self._plans.families.count,
            cache_size_limit=self._plans.cache.limit,
            stalled_seconds=current.executor.stalled_seconds,
        )

    def replan(self) -> None:
        """Forget all plans: the next call captures the step anew.

        This is the way to make a change known that no plan looks for, such as a global variable that a
        library's code reads.
        """
        with self._lock:
            self._plans.forget()

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite the buffers that are free between two calls, the host's, too; the next must not notice.

        Args:
            byte: what every byte becomes.

        Raises:
            StepModeError: while a buffer holds what a backward of this module still needs.
        """
        if self._turn.is_taken:
            raise StepModeError("the buffer holds activations that a backward still needs")
        pool_of(self._plans.current.executor.step.captured.device).poison(byte)
        poison_host_memory(byte)

    def report(self, eager: Recording | None = None) -> StepReport:
        """Compare the plan with eager and say how the last call was served; tables when printed.

        Eager's step is followed under fake tensors, nothing runs; from the second call on with the kernels'
        workspaces that the first one recorded.

        Args:
            eager: a recording (:func:`olla_fx.record`) of the same step in eager, to take the figures
                with workspaces from.

        Raises:
            RecordingError: if nothing was recorded.
        """
        steps = self._plans.current.steps
        inputs = pytree.tree_map_only(TensorSpec, _on_meta, self._plans.current.example)
        captured = steps[0].captured
        answers = known_answers(captured.questions)
        request = replace(self._request, inputs=inputs, mode=captured.mode, answers=answers)
        return report_on(steps, self.plan, request, self.stats, eager)

    def __getattr__(self, name: str) -> Any:
        """Find whatever else the model has: its ``config``, or a method of its own, which runs in eager."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the model, if the model has it, else on this module."""
        model = self.__dict__.get("_model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """Return a planned module of copies of model, loss and optimizer; it plans for itself."""
        old = self._request
        remade = memo[id(self)] = PlannedModule.__new__(PlannedModule)  # the loss's object may hold it
        model, loss_fn, optimizer = copy.deepcopy((old.model, old.loss_fn, old.optimizer), memo)
        request = replace(old, model=model, loss_fn=loss_fn, optimizer=optimizer)
        PlannedModule.__init__(remade, _request_for(request, self._example, self._answers))
        remade.__dict__.update(copy.deepcopy(carried(self), memo))
        return remade

    def __reduce__(self) -> Any:
        """Pickle model, loss, optimizer and options; plans are made again, or found on disk."""
        refuse_unnamed(self._request.loss_fn)
        return _remade, (self._request, self._example, self._answers), carried(self)

    def train(self, mode: bool = True) -> PlannedModule:
        """Set the model's training flag; see ``nn.Module.train``."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PlannedModule:
        self._model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's; see ``nn.Module.state_dict``."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; see ``nn.Module.load_state_dict``."""
        return self._model.load_state_dict(*args, **kwargs)


def _has_gradient(captured: CapturedStep, values: Sequence[Any]) -> bool:
    """Return True if a leaf among a step's inputs has a ``.grad``."""
    for index in captured.gradients:
        if values[index].is_leaf and values[index].grad is not None:
            return True
    return False


def _remade(request: StepRequest, example: Any, answers: Mapping[str, Any]) -> PlannedModule:
    """Make a planned module from the kinds of its example's tensors and the answers that these gave."""
    return PlannedModule(_request_for(request, example, answers))


def _request_for(request: StepRequest, example: Any, answers: Mapping[str, Any]) -> StepRequest:
    """Return a request for the kinds of an example's tensors."""
    with torch_compat.new_fake_mode():
        inputs = pytree.tree_map_only(TensorSpec, _stand_in, example)
    return replace(request, inputs=inputs, answers=answers)


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    stand_in = replace(spec, device=torch.device("meta")).empty(meta_as=torch.device("meta"))
    return stand_in.requires_grad_(spec.requires_grad)


def _stand_in(spec: TensorSpec) -> torch.Tensor:
    return spec.empty(meta_as=spec.device).requires_grad_(spec.requires_grad)
