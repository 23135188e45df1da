"""Whether a step's modules and tensors are what they were, asked at every call.

A look at each of hundreds of modules and parameters costs about as much as a small model's kernels if
Python does the looking. What was found in order once is kept here in columns, and compared with the present
in loops in C. A glance that shows a change proves nothing: whoever asks then looks closely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat

_children_of = attrgetter("_modules")
_training_of = attrgetter("training")
_kind_of = attrgetter("dtype", "device", "requires_grad")

_items_of = methodcaller("items")  # not dict.items, which knows no order but that of a dict itself
_get: Callable[[dict[str, Any], str], Any] = dict.get

Place = tuple[nn.Module, str, str]
"""A module, the name of one of its dictionaries, and a key in it."""


class ModulesGlance:
    """The tree, the training flags and the hooks of all modules of a step."""

    def __init__(self, modules: Sequence[nn.Module], training: Sequence[bool]) -> None:
        """Remember the tree as it is now, and the flags that are wanted."""
        self._modules = tuple(modules)
        self._parents = [module for module in self._modules if module._modules]
        self._childless = [module for module in self._modules if not module._modules]
        self._children = self._present_children()
        self._training = list(training)
        hooks = [(module, torch_compat.module_hooks(module)) for module in self._modules]
        self._hooked = [(module, its_hooks) for module, its_hooks in hooks if its_hooks]
        self._without_hooks = [module for module, its_hooks in hooks if not its_hooks]

    def shows_change(self) -> bool:
        """Whether children, training flags or hooks are others."""
        return (
            self.shows_other_children()
            or list(map(_training_of, self._modules)) != self._training
            or torch_compat.any_module_hooks(self._without_hooks)
            or any(torch_compat.module_hooks(module) != hooks for module, hooks in self._hooked)
        )

    def shows_other_children(self) -> bool:
        """Whether a module has other children, or under other names."""
        return self._present_children() != self._children or any(map(_children_of, self._childless))

    def _present_children(self) -> list[tuple[tuple[str, nn.Module | None], ...]]:
        return list(map(tuple, map(_items_of, map(_children_of, self._parents))))


class TensorsGlance:
    """The tensors in a step's places: of which kind they are, and which are one.

    Nothing is kept alive: a tensor that took the address of one that is gone is as good if it is alike.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        """Remember where to look."""
        self._modules = [module for module, _, _ in places]
        self._tables = [table for _, table, _ in places]
        self._keys = [key for _, _, key in places]
        self._identities: list[tuple[int, type]] | None = None
        self._kinds: list[object] = []
        self._complex: list[int] = []

    def remember(self) -> None:
        """Take what is there now for what is wanted: each place holds a tensor, as a close look has shown."""
        present = self.present()
        self._complex = [index for index, tensor in enumerate(present) if tensor.is_complex()]
        self._identities, self._kinds = _identities(present), self._kinds_of(present)

    def shows_change(self) -> bool:
        """Whether a place holds another tensor, or one of another kind, or nothing was remembered yet."""
        present = self.present()
        return _identities(present) != self._identities or self._kinds_of(present) != self._kinds

    def shows_hooks(self) -> bool:
        """Whether gradient hooks hang on one of the tensors, none of which has changed."""
        return torch_compat.any_tensor_hooks(self.present())

    def _kinds_of(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        """Sizes, layout, type and device of tensors, and which are to be conjugated or negated when read."""
        return [
            *map(torch.Tensor.size, tensors),  # takes half as long as shape
            *map(_kind_of, tensors),
            *map(torch.Tensor.stride, tensors),
            *map(torch.Tensor.is_neg, tensors),
            *(tensors[index].is_conj() for index in self._complex),
        ]

    def present(self) -> list[Any]:
        """What is in the places now; None where nothing is."""
        return list(map(_get, map(getattr, self._modules, self._tables), self._keys))


def _identities(objects: Sequence[object]) -> list[tuple[int, type]]:
    return list(zip(map(id, objects), map(type, objects), strict=True))
