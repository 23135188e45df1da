"""The module that a user calls: their model's step, planned.

It shares the model's parameters, buffers and ``state_dict`` keys. Every call looks its inputs up by
name; where model or optimizer changed in a way that the plan depends on, the step is planned again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import CapturedStep, Mode, StepRequest
from olla_fx.plan import Plan
from olla_fx.report import StepReport
from olla_fx.run.executor import Binding, Executor, RunCounts
from olla_fx.run.lookup import StepLookup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledStep:
    """One planned step.

    Attributes:
        captured: what was captured.
        executor: runs it.
        describe: the executor's present plan as its user sees it.
    """

    captured: CapturedStep
    executor: Executor
    describe: Callable[[Executor], Plan]


Compile = Callable[[StepRequest], CompiledStep]


class PlannedModule(nn.Module):
    """A planned step.

    Attributes:
        replans: how often the step was planned again because model or optimizer changed.
    """

    _model: nn.Module
    _request: StepRequest
    _step: CompiledStep
    _lookup: StepLookup

    def __init__(self, request: StepRequest, compile_step: Compile) -> None:
        """Plan the step; runs nothing on real data.

        Args:
            request: what to plan.
            compile_step: captures and plans a request.
        """
        super().__init__()
        model = request.model
        # The very dictionaries of the model: parameters, state_dict and .to() are the model's own.
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self.training = model.training
        # Not as a child module: that would change the keys of state_dict.
        object.__setattr__(self, "_model", model)
        self._request = request
        self._compile = compile_step
        self._lock = threading.RLock()
        self.replans = 0
        self._plan_step(request)

    def _plan_step(self, request: StepRequest) -> None:
        self._step = self._compile(request)
        self._lookup = StepLookup(self._step.captured, request)

    def forward(self, *inputs: Any) -> Any:
        """Run one step.

        Args:
            inputs: the model's inputs, for training the target last; as in the example.

        Returns:
            The model's outputs; for training the loss, or ``(loss, outputs)`` with ``return_outputs``.

        Raises:
            StepInputError: when the inputs are not of the planned kind.
            StepModeError: when the model is in the other mode.
        """
        with self._lock:
            self._lookup.check_mode()
            self._lookup.adopt_parameters()
            reason = self._lookup.outdated()
            if reason is not None:
                logger.info("planning again: %s", reason)
                self._plan_step(self._request_for(inputs))
                self.replans += 1
            examples = self._lookup.check_inputs(inputs)
            results = self._step.executor.run(self._lookup.gather(examples))
            self._note_step()
            return self._step.captured.outputs.rebuild(results)

    def _request_for(self, inputs: tuple[Any, ...]) -> StepRequest:
        old = self._request
        return StepRequest(old.model, inputs, old.mode, old.loss_fn, old.optimizer, old.return_outputs)

    def _note_step(self) -> None:
        optimizer = self._request.optimizer
        if self._step.captured.mode is Mode.TRAINING and optimizer is not None:
            torch_compat.note_optimizer_stepped(optimizer)
            torch_compat.run_optimizer_post_hooks(optimizer)

    @property
    def plan(self) -> Plan:
        """The plan in force: with workspaces from the second call on."""
        return self._step.describe(self._step.executor)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The reordered graph in force; print its ``code`` to read it."""
        return self._step.executor.graph_module

    @property
    def binding(self) -> Binding:
        """Whether arrays live in the buffer or with the stock allocator."""
        return self._step.executor.binding

    @property
    def counts(self) -> RunCounts:
        """Allocation requests of the last call."""
        return self._step.executor.counts

    @property
    def outside_log(self) -> tuple[str, ...]:
        """The last call's unexpected requests, for finding out why one was not served."""
        return self._step.executor.outside_log

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite the buffer between two calls; the next call must not notice.

        Args:
            byte: what every byte becomes.
        """
        self._step.executor.poison(byte)

    def report(self) -> StepReport:
        """What the plan saves and how the last call was served, as a table when printed."""
        return StepReport(self.plan, self.binding, self.counts)

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
