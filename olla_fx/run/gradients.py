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
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from olla_fx import arena, torch_compat
from olla_fx.capture import CapturedStep
from olla_fx.compiled import CompiledStep
from olla_fx.dataflow import GradientsInBuffer

MOST_PAST = 16
"""Graphs of earlier backwards that the caller keeps and that are looked through."""


_NO_EDGES: collections.Counter[int] = collections.Counter()


class GradientEdges:
    """The edges by which one forward's node leads to leaves.

    Attributes:
        leaves: the tensors that want a gradient, as long as the node lives; also others until its backward.
    """

    _past: ClassVar[weakref.WeakSet[GradientEdges]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        """Count the edges of a node whose backward may still run."""
        self.leaves = tuple(leaves)
        self._ended_in = 0

    def end(self) -> None:
        """Note that nothing will come over these edges after the backward that is under way."""
        self.leaves = tuple(leaf for leaf in self.leaves if leaf.is_leaf)
        if not self.leaves:
            return
        self._ended_in = torch_compat.backward_number()
        with self._lock:
            self._past.add(self)

    def forget(self) -> None:
        """Note that the edges are gone."""
        self.leaves = ()

    @classmethod
    def past(cls) -> collections.Counter[int] | None:
        """Return the number of edges to each leaf, by its identity, that earlier backwards have left.

        Returns:
            None if the caller keeps so many graphs that looking through them does not pay.
        """
        if not cls._past:
            return _NO_EDGES
        with cls._lock:
            ended = [edges for edges in cls._past if edges._ended_in != torch_compat.backward_number()]
        if len(ended) > MOST_PAST:
            return None
        return collections.Counter(id(leaf) for edges in ended for leaf in edges.leaves)


class Gradients:
    """The gradients of one backward.

    Attributes:
        taken: takes them from emitted code.
    """

    def __init__(
        self,
        step: CompiledStep,
        values: Sequence[Any],
        tangents: Sequence[torch.Tensor | None],
    ) -> None:
        """Take nothing yet.

        Args:
            step: the planned one.
            values: of its placeholders before the tangents.
            tangents: that backward was given; None for outputs that were not used.
        """
        captured, in_buffer = step.captured, step.dataflow.gradients
        self._captured = captured
        self._in_buffer = in_buffer
        self._leaves = [values[index] for index in captured.gradients]
        self.taken = arena.taken_gradients(step.emitted.native, self._leaves, in_buffer.kept, in_buffer.added)
        absent = _not_made(captured, tangents)
        if absent:
            self.taken.leave_out(absent)

    def accumulate_directly(self) -> None:
        """Add to ``.grad`` at once if autograd would add this gradient alone, with no hook that sees it."""
        past = GradientEdges.past()
        if past is not None:
            self.taken.accumulate_directly([1 + past[id(leaf)] for leaf in self._leaves] if past else ())

    def suited_to_buffer(self) -> GradientsInBuffer:
        """Return which gradients a plan for such a backward has in the buffer; ask before it."""
        suited = self.taken.suited()
        return self._in_buffer if suited is None else GradientsInBuffer(*map(frozenset, suited))

    def for_autograd(self) -> list[torch.Tensor | None]:
        """Return what autograd is to be given for each placeholder that wants a gradient."""
        captured, gradients = self._captured, self.taken.for_autograd()
        if captured.gradients == captured.wanted:
            return gradients
        by_placeholder = dict(zip(captured.gradients, gradients, strict=True))
        return [by_placeholder.get(index) for index in captured.wanted]


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
