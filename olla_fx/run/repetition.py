"""A forward run again, where its backward receives gradients in other memory layouts than were planned for.

In the caller's own loop nobody knows before the first backward in which layout the loss hands gradients in:
that of an output whose memory is ``channels_last`` often comes in rows. The order of a sum's terms, and with
it the last bit, depends on that. So the step is planned again for what came, and that one forward is
repeated from the same random numbers and buffers; from then on the layout is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from olla_fx.capture import CapturedStep

if TYPE_CHECKING:
    from olla_fx.run.executor import Run

Strides = tuple[tuple[int, ...], ...]
Begin = Callable[[], "tuple[CapturedStep, Run]"]


@dataclass
class TangentLayouts:
    """What is known of the gradients that come back to a plan's outputs.

    Attributes:
        are_known: whether their layouts are settled.
        were_seen: whether the plan was made for what a backward received.
    """

    are_known: bool = False
    were_seen: bool = False

    @classmethod
    def of(cls, strides: Strides) -> TangentLayouts:
        """Of a plan for tangents of these strides; empty for those of the outputs.

        A gradient that is one number spread out, as that of a sum, leaves no place for any other: what it is
        may change with every backward.
        """
        return cls(bool(strides) and not is_spread(strides), bool(strides))


def is_spread(strides: Strides) -> bool:
    """Whether a tangent has several elements in one place."""
    return any(0 in each for each in strides)


class Repetition:
    """All that one forward reads, as it was."""

    def __init__(
        self,
        layouts: TangentLayouts,
        captured: CapturedStep,
        values: Sequence[Any],
        plan_again: Callable[[Strides], Begin | None],
    ) -> None:
        """Keep it; call this just before the forward.

        Args:
            layouts: of the plan; known once tangents of them have come.
            captured: what the forward runs.
            values: of all placeholders before the tangents.
            plan_again: begins a run for tangents of other layouts; None where model or inputs have changed.
        """
        self._layouts = layouts
        self._plan_again = plan_again
        self._devices = [captured.device] if captured.device.type == "cuda" else []
        self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
        self._values = [
            each.detach().clone() if index in captured.written else each for index, each in enumerate(values)
        ]
        tensors = [each for each in self._values if isinstance(each, torch.Tensor)]
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]

    def begin(self, planned: Strides, given: Strides) -> Begin | None:
        """What begins another run; None where the first one goes on.

        Args:
            planned: element strides of the tangents that were planned for.
            given: of those that came.
        """
        if given == planned:
            self._layouts.are_known = not is_spread(planned)
            return None
        if any(each._version != version for each, version in self._versions):
            return None
        return self._plan_again(given)

    def forward(self, begin: Begin) -> tuple[CapturedStep, Run, list[Any], list[Any]]:
        """Run forward again: what runs, its run, its arguments, and what backward needs of it.

        Args:
            begin: from :meth:`begin`.
        """
        captured, run = begin()
        tangents = [None] * (len(captured.inputs) - len(self._values))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            _, kept = run.run_phase(0, [*self._values, *tangents], last=False)
        return captured, run, self._values, list(kept)
