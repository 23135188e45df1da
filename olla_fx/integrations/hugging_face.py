"""Plans the model of a ``transformers.Trainer``: ``Trainer(..., callbacks=[OllaCallback()])``.

Trainer's loop stays its own: forward and backward are planned together, as in any loop of one's own.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from olla_fx.errors import MissingPackageError
from olla_fx.integrations.in_place import PlannedCalls
from olla_fx.options import Options, changed_options
from olla_fx.run import PlannedModule
from olla_fx.run.stats import StepStats
from olla_fx.step_plan import Plan

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingPackageError("transformers", "transformers accelerate", error) from error

logger = logging.getLogger(__name__)


class OllaCallback(TrainerCallback):  # type: ignore[misc]
    """Plans the calls of a Trainer's model while it trains, evaluations between included."""

    def __init__(self, options: Options | None = None, **changes: Any) -> None:
        """Choose how to plan.

        Args:
            options: as of :func:`olla_fx.optimize`.
            changes: single options by keyword, as of :func:`olla_fx.optimize`.

        Raises:
            CaptureError: if an option is about the update of weights, which Trainer makes.
            OptionError: if an option is unknown or its value makes no sense.
        """
        self._calls = PlannedCalls(changed_options(options, changes))

    @property
    def plan(self) -> Plan | None:
        """The plan of the last kind of call; None before the first one, and if there is none."""
        return self._calls.plans.get("")

    @property
    def stats(self) -> StepStats | None:
        """How the calls ran; None before the first plan."""
        return self._calls.stats.get("")

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Plan the model when it is first called.

        Args:
            args: Trainer's, like all that follow.
            state: how far training is.
            control: what Trainer does next.
            model: as Trainer was given it.
            others: optimizer, data loaders and so on.

        Raises:
            CaptureError: if the model is compiled by ``nn.Module.compile``.
        """
        self._calls.release()  # of a training that an error ended
        if not isinstance(model, PlannedModule):
            self._calls.add({"": model})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Let the model run itself again; arguments are as of :meth:`on_train_begin`."""
        self._calls.release()
        if self.plan is not None and self.stats is not None:
            logger.info("%s; %d calls in eager", self.plan, self.stats.eager_runs)
