"""Plans the networks of a ``LightningModule``: ``lightning.Trainer(callbacks=[OllaCallback()])``.

What ``training_step`` calls is planned, forward and backward together: the LightningModule's own
``forward``, or the networks that it holds. The step around them (the loss, what is logged, the
optimizers) stays Lightning's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from olla_fx.errors import CaptureError, MissingPackageError
from olla_fx.integrations.in_place import PlannedCalls
from olla_fx.options import Options, changed_options
from olla_fx.run.stats import StepStats
from olla_fx.step_plan import Plan

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingPackageError("lightning", "lightning", error) from error

logger = logging.getLogger(__name__)


class OllaCallback(Callback):  # type: ignore[misc]
    """Plans the calls of a LightningModule's networks while it is fitted, validation included."""

    def __init__(
        self, modules: Sequence[str] | None = None, options: Options | None = None, **changes: Any
    ) -> None:
        """Choose what to plan, and how.

        Args:
            modules: dotted names of the modules to plan, ``""`` for the LightningModule's own ``forward``.
                By default that, where ``training_step`` calls it, and otherwise the modules that it holds and
                calls.
            options: as of :func:`olla_fx.optimize`.
            changes: single options by keyword, as of :func:`olla_fx.optimize`.

        Raises:
            CaptureError: if an option is about the update of weights, which Lightning makes.
            OptionError: if an option is unknown or its value makes no sense.
        """
        self._names = None if modules is None else tuple(modules)
        self._calls = PlannedCalls(changed_options(options, changes))

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of the last kind of call of each module that has one, by name."""
        return self._calls.plans

    @property
    def stats(self) -> dict[str, StepStats]:
        """How the calls of each such module ran, by name."""
        return self._calls.stats

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Plan the networks when they are first called.

        Args:
            trainer: Lightning's.
            pl_module: what is fitted.

        Raises:
            CaptureError: if a module is not there, or is compiled by ``nn.Module.compile``.
        """
        self._calls.release()
        self._calls.add(self._chosen(pl_module))

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Let the networks run themselves again; arguments are as of :meth:`on_fit_start`."""
        self._calls.release()
        for name, plan in self.plans.items():
            runs = self.stats[name].eager_runs
            logger.info("%s: %s; %d calls in eager", name or type(pl_module).__name__, plan, runs)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Let the networks run themselves again after an error.

        Args:
            trainer: Lightning's.
            pl_module: what is fitted.
            exception: what was raised.
        """
        self._calls.release()

    def _chosen(self, pl_module: nn.Module) -> dict[str, nn.Module]:
        if self._names is None:
            return {"": pl_module, **dict(_called_within(pl_module, ""))}
        modules = dict(pl_module.named_modules())
        unknown = [name for name in self._names if name not in modules]
        if unknown:
            raise CaptureError(
                f"{type(pl_module).__name__} has no module {unknown[0]!r}: name some of "
                f"{', '.join(map(repr, modules))}"
            )
        return {name: modules[name] for name in self._names}


def _called_within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with trained parameters that a module holds, itself or in containers."""
    for name, child in module.named_children():
        named = f"{path}.{name}" if path else name
        if not any(parameter.requires_grad for parameter in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_within(child, named)
        else:
            yield named, child
