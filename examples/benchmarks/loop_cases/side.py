"""One side of a comparison: a loop in eager, or the same with planned models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import olla_fx


@dataclass(frozen=True)
class Side:
    """A loop that is ready to run.

    Attributes:
        run: runs a step of some index; returns its loss.
        models: those whose weights the loop trains.
    """

    run: Callable[[int], torch.Tensor]
    models: Sequence[nn.Module]


class Planner:
    """Plans models for a loop, or leaves them as they are.

    Attributes:
        way: ``eager``, ``own`` for the caller's own loop, ``whole`` for whole training steps.
        seconds: the processor time that planning took before the loop.
        planned: the planned modules so far.
    """

    def __init__(self, way: str) -> None:
        """Begin without any."""
        self.way = way
        self.seconds = 0.0
        self.planned: list[Any] = []

    @property
    def eager_runs(self) -> int:
        """The number of calls without a plan so far."""
        return sum(module.stats.eager_runs for module in self.planned)

    def __call__(self, model: nn.Module, example: tuple[Any, ...], **options: Any) -> Any:
        """Return the planned module, or the model itself in eager; arguments as of ``olla_fx.optimize``."""
        if self.way == "eager":
            return model
        started = time.process_time()
        self.planned.append(olla_fx.optimize(model, example, **options))
        self.seconds += time.process_time() - started
        return self.planned[-1]


Case = Callable[[Planner, int], Side]
"""Makes a loop of so many steps."""
