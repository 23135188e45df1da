"""Traces recomputations of checkpointed activations with the random masks that forward drew.

``torch.utils.checkpoint`` (without reentry) works through saved-tensor hooks, which tracing leaves out
unless told not to (:func:`olla_fx.torch_compat.saved_tensor_hooks_in_traces`). The recomputation then
stands in the graph. Its dropout would draw anew: the graph's operators draw from the generator in the order
in which they run, whereas eager sets the generator back. So while tracing, every random operator takes a
number from the real generator, which checkpointing does set back: if a number comes a second time, its
operator belongs to a recomputation and returns the first one's result instead of drawing.
"""

from __future__ import annotations

from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.torch_compat import pytree, schema_of

aten = torch.ops.aten


class Draws:
    """The random operators traced so far, by numbers of the real generator.

    Attributes:
        recomputed: the number of operators traced in recomputations.
    """

    def __init__(self) -> None:
        """Start without draws."""
        self._results: dict[tuple[int, str, tuple[torch.Size, ...]], Any] = {}
        self.recomputed = 0

    def count(self, operator: Any) -> None:
        """Count an operator that a recomputation runs: backward itself runs without gradients."""
        if torch_compat.in_backward() and torch.is_grad_enabled() and not operator.is_view:
            self.recomputed += 1

    def draw(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a random operator, or return its first run's result."""
        shapes = tuple(argument.shape for argument in args if isinstance(argument, torch.Tensor))
        key = torch_compat.real_random_number(), str(operator), shapes
        if key not in self._results:
            result = operator(*args, **kwargs)
            values = result[1] if operator is aten.native_dropout.default else result
            # The result itself may be written to; unused clones are dropped with the dead code.
            self._results[key] = pytree.tree_map_only(torch.Tensor, torch.clone, values)
            return result
        first = self._results[key]
        if operator is aten.native_dropout.default:
            # The kernel's own arithmetic: the mask's elements, then the scale.
            scale = 0.0 if args[1] == 1 else 1.0 / (1.0 - args[1])
            return args[0].mul(first).mul(scale), first
        if schema_of(operator).is_mutable:
            return args[0].copy_(first)
        return pytree.tree_map_only(torch.Tensor, torch.clone, first)
