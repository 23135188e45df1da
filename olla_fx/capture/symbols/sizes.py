"""Makes symbols for the sizes of a step's inputs that vary, and for counts that Python asks of the inputs.

The inputs of a tracing run get shapes and strides that are computed from these symbols, by what
:mod:`olla_fx.capture.varying` says of each tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.capture.varying import LEAST, VaryingSizes
from olla_fx.guards import TensorSpec


class SymbolicSizes:
    """The sizes and counts of one tracing run that are symbols.

    Attributes:
        varying: the sizes of the inputs.
        sizes: a symbolic number for each.
        counts: a symbolic number for each number that Python has asked of the inputs, by the question's key.
    """

    def __init__(self, varying: VaryingSizes, fake_mode: Any, *, has_counts: bool) -> None:
        """Make symbols in a fake mode.

        Args:
            varying: the sizes of the inputs.
            fake_mode: of the tracing run.
            has_counts: True to make symbols for what inputs answer, too.
        """
        self.varying = varying
        self.has_counts = has_counts
        self.sizes = tuple(
            torch_compat.new_size(fake_mode, index, hint) for index, hint in enumerate(varying.hints)
        )
        self.counts: dict[str, torch.SymInt] = {}
        self._fake_mode = fake_mode

    def answered(self, key: str, answer: Any) -> Any:
        """Return the symbol for an answer of the inputs; the answer itself if it is no number to be one.

        Args:
            key: of the question.
            answer: of the example.
        """
        if not self.has_counts or type(answer) is not int or answer < LEAST:
            return answer
        if key not in self.counts:
            index = len(self.sizes) + len(self.counts)
            self.counts[key] = torch_compat.new_size(self._fake_mode, index, answer)
        torch_compat.track_size(self.counts[key])
        return self.counts[key]

    def stand_in(self, position: int, like: TensorSpec) -> torch.Tensor:
        """Return a tensor with symbolic sizes, under fake tensors.

        Args:
            position: of the tensor among the inputs.
            like: it at the hints.
        """
        return self.varying.tensors[position].empty(self.sizes, like)
