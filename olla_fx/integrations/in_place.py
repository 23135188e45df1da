"""Plans the calls of modules that stay what they are, for loops that keep the model to themselves.

A module is planned when it is first called for training, with the inputs of that call. It stays in its place,
with its class, its hooks and the keys of its ``state_dict``: what is called in its place is kept where
``nn.Module.compile`` keeps it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import Mode, StepRequest
from olla_fx.capture.arguments import in_sequence
from olla_fx.errors import CaptureError, OllaError
from olla_fx.options import Options
from olla_fx.run import PlannedModule
from olla_fx.run.calls import shows_the_model
from olla_fx.run.stats import StepStats
from olla_fx.step_plan import Plan


class PlannedCalls:
    """Modules whose calls are planned, until they are released.

    Of modules within one another the outermost that is called is planned.
    """

    def __init__(self, options: Options) -> None:
        """Plan nothing yet.

        Args:
            options: as of :func:`olla_fx.optimize`.

        Raises:
            CaptureError: if they are about the update of weights, which the loop makes itself.
        """
        if options.changes_gradients or options.return_outputs:
            raise CaptureError(
                "accumulation_steps, clip_grad_norm, clip_grad_value and return_outputs are parts of a whole "
                "training step, and here the loop is the library's: set them there"
            )
        self._options = options
        self._running = threading.local()
        self._planned: dict[str, _InPlace] = {}
        self._plans: dict[str, Plan] = {}
        self._stats: dict[str, StepStats] = {}

    def add(self, modules: Mapping[str, nn.Module]) -> None:
        """Let modules be planned when they are called.

        Args:
            modules: by the names under which plans are listed.

        Raises:
            CaptureError: if something else is called in the place of one, as after ``nn.Module.compile``.
        """
        for name, module in modules.items():
            if isinstance(torch_compat.called_instead(module), _InPlace):
                torch_compat.call_instead(module, None)  # of a training that an error ended
            if torch_compat.called_instead(module) is not None:
                raise CaptureError(
                    f"{name or type(module).__name__} is compiled (nn.Module.compile): it runs compiled or "
                    "planned. Leave one of the two out"
                )
        for name, module in modules.items():
            self._planned[name] = _InPlace(module, self._options, self._running)
            torch_compat.call_instead(module, self._planned[name])

    def release(self) -> None:
        """Let the modules run themselves again, and give memory back; plans and statistics stay."""
        self._plans, self._stats = self.plans, self.stats
        for place in self._planned.values():
            torch_compat.call_instead(place.module, None)
        self._planned = {}

    @property
    def modules(self) -> dict[str, PlannedModule]:
        """The modules that are planned by now."""
        planned = {name: place.planned for name, place in self._planned.items()}
        return {name: module for name, module in planned.items() if module is not None}

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of the last kind of call of each module that has one, or had until it was released."""
        return self._plans | {name: module.plan for name, module in self.modules.items()}

    @property
    def stats(self) -> dict[str, StepStats]:
        """How the calls of each such module ran."""
        return self._stats | {name: module.stats for name, module in self.modules.items()}


class _InPlace:
    """What is called in a module's place.

    Attributes:
        module: the module.
        planned: it, planned; None before the first call for training, and if it cannot be planned.
    """

    def __init__(self, module: nn.Module, options: Options, running: threading.local) -> None:
        self.module = module
        self.planned: PlannedModule | None = None
        self._options = options
        self._running = running
        self._forward = module.forward
        self._is_refused = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the module, planned if it is the outermost one."""
        if self._runs_itself():
            return torch_compat.call_itself(self.module, *inputs, **named)
        self._running.is_inside = True
        try:
            if self.planned is None:
                self._plan(inputs, named)
            called = self.module if self.planned is None else self.planned
            return torch_compat.call_itself(called, *inputs, **named)
        finally:
            self._running.is_inside = False

    def _runs_itself(self) -> bool:
        # The first question alone is Dynamo's.
        if shows_the_model() or self._is_refused or getattr(self._running, "is_inside", False):
            return True
        # Distributed strategies call another method through a forward that they replace for a moment.
        if self.module.forward != self._forward:
            return True
        return self.planned is None and not (torch.is_grad_enabled() and self.module.training)

    def _plan(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            given = in_sequence(self.module, inputs, named) if named else inputs
            self.planned = PlannedModule(
                StepRequest(self.module, given, Mode.AUTOGRAD, options=self._options)
            )
        except OllaError as error:
            if self._options.fallback == "raise":
                raise
            self._is_refused = True
            warnings.warn(
                f"{type(self.module).__name__} runs without a plan: {error} (fallback='raise' makes this an "
                "error)",
                RuntimeWarning,
                stacklevel=4,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the module is called itself."""

    def __reduce__(self) -> Any:
        """Let a pickled module be called itself."""
        return type(None), ()
