"""Traces recomputations of checkpointed activations, with random draws that repeat those of forward.

``torch.utils.checkpoint`` (without reentry) works through saved-tensor hooks, which tracing leaves out
unless told not to (:func:`olla_fx.torch_compat.saved_tensor_hooks_in_traces`). The recomputation then
stands in the graph. Its dropout would draw anew: a graph's operators draw from the generator in the order
in which they run, whereas eager sets the generator back, and afterwards forward again. The graph does the
same. Every random operator takes a number from the real generator while it is traced, which checkpointing
does set back: if a number comes a second time, its operator belongs to a recomputation. The state of the
generator from before the number's first draw, which the graph saves, is then set, unless the number before
it came just now, and the operator draws again. States that no recomputation needs are dead code.

A CUDA graph can neither read nor set a generator's state. In a step that is to be captured as one,
recomputed draws return what forward drew, which is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from olla_fx import draws, torch_compat
from olla_fx.torch_compat import pytree, schema_of

aten = torch.ops.aten


class Draws:
    """The random operators traced so far, by numbers of the real generator."""

    def __init__(self, *, keeps_results: bool) -> None:
        """Start without draws.

        Args:
            keeps_results: True if a recomputation returns what forward drew instead of drawing again.
        """
        self._results: dict[int, Any] | None = {} if keeps_results else None
        self._generators: dict[torch.device, _Generator] = {}

    def draw(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a random operator."""
        number = torch_compat.real_random_number()
        if self._results is not None:
            return _drawn_once(self._results, number, operator, args, kwargs)
        device = _device_of(args, kwargs)
        self._generators.setdefault(device, _Generator(device)).prepare(number)
        return operator(*args, **kwargs)

    def end_recomputation(self) -> None:
        """Set generators that recomputations have set back to where these found them."""
        for generator in self._generators.values():
            generator.go_back()


class _Generator:
    """One device's generator in the traced graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, torch.Tensor] = {}
        self._next: dict[int, int] = {}
        self._newest: int | None = None
        self._repeated: int | None = None
        self._found: torch.Tensor | None = None

    def prepare(self, number: int) -> None:
        """Bring the generator into the state in which eager's is before it draws a number."""
        if number not in self._states:
            self.go_back()
            self._states[number] = draws.random_state(self._device)
            if self._newest is not None:
                self._next[self._newest] = number
            self._newest = number
            return
        if self._found is None:
            self._found = draws.random_state(self._device)
        if self._repeated is None or self._next.get(self._repeated) != number:
            draws.set_random_state(self._states[number], self._device)
        self._repeated = number

    def go_back(self) -> None:
        """Set the state in which the first recomputation found the generator."""
        if self._found is not None:
            draws.set_random_state(self._found, self._device)
        self._found = self._repeated = None


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that a random operator draws on."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")


def _drawn_once(
    results: dict[int, Any], number: int, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Trace a random operator, or return what it drew when its number came first."""
    if number not in results:
        result = operator(*args, **kwargs)
        values = result[1] if operator is aten.native_dropout.default else result
        # The result itself may be written to; unused clones are dropped with the dead code.
        results[number] = pytree.tree_map_only(torch.Tensor, torch.clone, values)
        return result
    first = results[number]
    if operator is aten.native_dropout.default:
        # The kernel's own arithmetic: the mask's elements, then the scale.
        scale = 0.0 if args[1] == 1 else 1.0 / (1.0 - args[1])
        return args[0].mul(first).mul(scale), first
    if schema_of(operator).is_mutable:
        return args[0].copy_(first)
    return pytree.tree_map_only(torch.Tensor, torch.clone, first)
