"""Lets a planned module be indexed and iterated over as its model is.

Python looks such methods up on the type, past ``__getattr__``. Here each asks the model, so that one without
them (most have none; ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` do) raises its own
``TypeError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ContainerMethods:
    """The methods of containers, each the model's own."""

    _model: Any

    def __getitem__(self, key: Any) -> Any:
        """Return what the model holds there."""
        return self._model[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Let the model hold something else there."""
        self._model[key] = value

    def __delitem__(self, key: Any) -> None:
        """Take something out of the model."""
        del self._model[key]

    def __len__(self) -> int:
        """Return how many modules the model holds."""
        return len(self._model)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the model."""
        return iter(self._model)

    def __contains__(self, item: object) -> bool:
        """Return True if the model holds something."""
        return item in self._model

    def __bool__(self) -> bool:
        """Return what the model is in a condition, where Python would ask for a length."""
        return bool(self._model)
