"""Takes the gradients of a planned backward one by one, as it makes them in planned order.

Autograd adds gradients to ``.grad`` once a whole backward node has run: until then all gradients of a planned
step would be alive, and with gradient accumulation beside the old ``.grad``. If autograd is going to add what
this backward brings, nothing else, and no hook is to see it, it is added to ``.grad`` at once, by
autograd's own arithmetic, and autograd gets nothing for it.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from olla_fx import arena, torch_compat
from olla_fx.capture import CapturedStep
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.run.pool import LeftGradients

MOST_PAST = 16
"""Graphs of earlier backwards that the caller keeps and that are looked through."""


class GradientEdges:
    """The edges by which one forward's node leads to leaves.

    Attributes:
        leaves: the tensors that want a gradient, as long as the node lives.
    """

    _past: ClassVar[weakref.WeakSet[GradientEdges]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        """Count the edges of a node whose backward may still run."""
        self.leaves = tuple(leaves)
        self._ended_in = 0

    def end(self) -> None:
        """Note that nothing will come over these edges after the backward that is under way."""
        self._ended_in = torch_compat.backward_number()
        with self._lock:
            self._past.add(self)

    @classmethod
    def past(cls) -> Mapping[int, int] | None:
        """Return the number of edges to each leaf, by its identity, that earlier backwards have left.

        Returns:
            None if the caller keeps so many graphs that looking through them does not pay.
        """
        with cls._lock:
            ended = [edges for edges in cls._past if edges._ended_in != torch_compat.backward_number()]
        if len(ended) > MOST_PAST:
            return None
        return collections.Counter(id(leaf) for edges in ended for leaf in edges.leaves)


class Gradients:
    """The gradients of one backward.

    Attributes:
        by_placeholder: those for autograd, no two in one storage, by the index of their placeholder.
        direct: positions of those that are not for autograd.
        left: those that became ``.grad`` in the buffer.
    """

    def __init__(
        self,
        captured: CapturedStep,
        values: Sequence[Any],
        tangents: Sequence[torch.Tensor | None],
        in_buffer: GradientsInBuffer,
    ) -> None:
        """Take nothing yet.

        Args:
            captured: the step.
            values: of its placeholders before the tangents.
            tangents: that backward was given; None for outputs that were not used.
            in_buffer: the gradients that the plan has in the buffer.
        """
        self._captured = captured
        self._values = values
        self._in_buffer = in_buffer
        self._accumulation = arena.accumulation(captured.device)
        self._absent = _not_made(captured, tangents)
        self._kept: set[int] = set()
        self.direct: frozenset[int] = frozenset()
        self.left: LeftGradients = []
        self.by_placeholder: dict[int, torch.Tensor] = {}

    def accumulate_directly(self) -> None:
        """Add to ``.grad`` at once if autograd would add this gradient alone, with no hook that sees it."""
        past = GradientEdges.past()
        if past is None:
            return
        accumulates_alone = self._accumulation.accumulates_alone
        leaves = [self._values[index] for index in self._captured.gradients]
        self.direct = frozenset(
            position
            for position, leaf in enumerate(leaves)
            if accumulates_alone(leaf, 1 + past.get(id(leaf), 0))
        )

    def suited_to_buffer(self) -> GradientsInBuffer:
        """Return which gradients a plan for such a backward has in the buffer; ask before it."""
        kept = frozenset(
            position
            for position in self.direct
            if position not in self._absent and self._values[self._captured.gradients[position]].grad is None
        )
        return GradientsInBuffer(kept, self.direct - kept)

    def take(self, position: int, gradient: torch.Tensor, is_made_here: bool) -> None:
        """Take a gradient; emitted code calls this right after the operator that makes it.

        Args:
            position: among the gradients of the step.
            gradient: may share its storage with another gradient.
            is_made_here: False if it is a tangent, a tensor of the caller's, or what forward has saved.
        """
        if position in self._absent:
            return
        index = self._captured.gradients[position]
        storage = self._accumulation.storage_address(gradient)
        # Autograd may keep what it is given and add to it.
        is_own = is_made_here and position not in self._in_buffer.added and storage not in self._kept
        if position in self.direct:
            leaf = self._values[index]
            becomes_grad = is_own and leaf.grad is None
            self._accumulation.accumulate(leaf, gradient, is_own)
            if becomes_grad:
                self._kept.add(storage)
                if position in self._in_buffer.kept:
                    self.left.append(weakref.ref(leaf.grad))
            return
        if not is_own or position in self._in_buffer.kept:
            with arena.interrupted():
                gradient = gradient.clone()
            storage = self._accumulation.storage_address(gradient)
        self._kept.add(storage)
        self.by_placeholder[index] = gradient


def _not_made(captured: CapturedStep, tangents: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Return the positions of gradients of nothing but outputs that nobody used: eager makes none."""
    used = {index for index, tangent in enumerate(tangents) if tangent is not None}
    if len(used) == len(tangents):
        return frozenset()
    return frozenset(
        position
        for position, reached_by in enumerate(captured.gradient_tangents)
        if reached_by and reached_by.isdisjoint(used)
    )
