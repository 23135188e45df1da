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
from olla_fx.run.checksums import checksum

if TYPE_CHECKING:
    from olla_fx.run.executor import Run

Strides = tuple[tuple[int, ...], ...]


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
    def of(cls, captured: CapturedStep, *, seen: bool) -> TangentLayouts:
        """Of a plan that was made for what a backward received, or for tangents that lie as the outputs.

        A gradient that is one number spread out, as that of a sum, leaves no place for any other: what it is
        may change with every backward.
        """
        return cls(seen and not captured.tangents_overlap, seen)


@dataclass(frozen=True)
class AnotherPlan:
    """A plan for tangents of other layouts.

    Attributes:
        captured: what it runs.
        layouts: what is known of its tangents.
        start: begins a run.
        plan_again: finds the plan for tangents of still others; None where model or inputs have changed.
    """

    captured: CapturedStep
    layouts: TangentLayouts
    start: Callable[[], Run]
    plan_again: Callable[[Strides], AnotherPlan | None]


class Repetition:
    """All that one forward reads, as it was."""

    def __init__(
        self,
        layouts: TangentLayouts,
        captured: CapturedStep,
        values: Sequence[Any],
        plan_again: Callable[[Strides], AnotherPlan | None],
    ) -> None:
        """Keep it; call this just before the forward.

        Args:
            layouts: of the plan; known once tangents of them have come.
            captured: what the forward runs.
            values: of all placeholders before the tangents.
            plan_again: finds the plan for tangents of other layouts; None where model or inputs have changed.
        """
        self._captured = captured
        self._layouts = layouts
        self._plan_again = plan_again
        self._devices = [captured.device] if captured.device.type == "cuda" else []
        self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
        self._written = captured.written
        self._values = self._with_copies(values)
        tensors = [
            each
            for index, each in enumerate(self._values)
            if index not in self._written and isinstance(each, torch.Tensor)
        ]
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]
        self._checksums = [(each, checksum(each)) for each in tensors]

    def _with_copies(self, values: Sequence[Any]) -> list[Any]:
        """The values, those that forward writes copied."""
        return [
            each.detach().clone() if index in self._written else each for index, each in enumerate(values)
        ]

    def plan_for(self, given: Strides) -> AnotherPlan | None:
        """The plan for tangents of these element strides; None where the present one is to go on."""
        if given == self._captured.tangent_strides:
            self._layouts.are_known = not self._captured.tangents_overlap
            return None
        if self._layouts.are_known or self._has_changed():
            return None
        return self._plan_again(given)

    def _has_changed(self) -> bool:
        """Whether anything is other than forward has read it, with or without autograd's knowledge."""
        return any(each._version != version for each, version in self._versions) or any(
            not torch.equal(checksum(each), before) for each, before in self._checksums
        )

    def forward(self, plan: AnotherPlan) -> tuple[Run, list[Any], list[Any]]:
        """Run forward again: its run, its arguments, and what backward needs of it.

        Args:
            plan: from :meth:`plan_for`.
        """
        captured = self._captured = plan.captured
        self._layouts, self._plan_again = plan.layouts, plan.plan_again
        run, values = plan.start(), self._with_copies(self._values)
        tangents = [None] * (len(captured.inputs) - len(values))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            _, kept = run.run_phase(0, [*values, *tangents], last=False)
        return run, values, list(kept)
