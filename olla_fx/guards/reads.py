"""The Python values that a captured step read, and the exact test that they are what they were.

``dropout.p``, ``bn.momentum``, a loss's weight on a term, a global constant: tracing reads such values
once and bakes them. While capturing, every attribute that is read from a module is noted
(:func:`olla_fx.torch_compat.attribute_reads`). Only those are compared later, so that a training loop may
keep its own counters on the model. What functions read is found by :mod:`olla_fx.guards.functions`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.guards import other_libraries
from olla_fx.guards.functions import function_behind, function_values, is_users
from olla_fx.guards.snapshot import CONTAINERS, is_plain, same, snapshot_of

MODULE_TABLES = (
    frozenset(nn.Module().__dict__)
    | frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__)
    | {"_flat_weights", "_flat_weight_refs"}
)
"""Attributes by which modules and traced modules work; what they hold is found and compared by name."""

_NOT_GUARDED = MODULE_TABLES | other_libraries.HARMLESS_ATTRIBUTES

ABSENT = object()
"""Stands for an attribute that does not exist."""

CLASS = "class"
OWN = "__dict__"
TABLES = ("_parameters", "_buffers", "_modules")


def find(module: nn.Module, key: str) -> tuple[str, object]:
    """Return where Python finds an attribute of a module, and the object; descriptors are not called."""
    of_class = next((kind.__dict__[key] for kind in type(module).__mro__ if key in kind.__dict__), ABSENT)
    own = module.__dict__
    if key in own and not hasattr(type(of_class), "__set__"):
        return OWN, own[key]
    if of_class is not ABSENT:
        return CLASS, of_class
    for table in TABLES:
        if key in own.get(table, ()):
            return table, own[table][key]
    return "", ABSENT


@dataclass(frozen=True, slots=True)
class GuardedAttribute:
    """One attribute that was read.

    Attributes:
        label: its dotted path.
        module: whose it is.
        key: its name.
        is_input: True for a tensor that is an input of the step, whose value may change.
        snapshot: of its value when it was read; for an input of where it was found.
    """

    label: str
    module: nn.Module
    key: str
    is_input: bool
    snapshot: object

    @classmethod
    def of(cls, label: str, module: nn.Module, key: str, is_input: bool) -> GuardedAttribute:
        """Guard an attribute's present value."""
        return cls(label, module, key, is_input, _attribute_snapshot(module, key, is_input, {}))

    def has_changed(self, snapshots: dict[int, object]) -> bool:
        """Return True if the value differs; ``snapshots`` by identity are shared among attributes."""
        return _attribute_snapshot(self.module, self.key, self.is_input, snapshots) != self.snapshot


def _attribute_snapshot(module: nn.Module, key: str, is_input: bool, snapshots: dict[int, object]) -> object:
    where, value = find(module, key)
    if where == CLASS and not is_plain(value) and not isinstance(value, CONTAINERS):
        return same(value)  # descriptors may keep values of all instances
    if is_input:
        return where
    if id(value) not in snapshots:
        snapshots[id(value)] = snapshot_of(value)
    return snapshots[id(value)]


@dataclass(frozen=True)
class Reads:
    """Everything that was read.

    Attributes:
        attributes: of modules.
        classes: every module that was read from by identity, with its name and class.
        functions: the loss and the user's methods that modules ran, each after its name and before a
            snapshot of what it reads beside its arguments.
    """

    attributes: tuple[GuardedAttribute, ...]
    classes: Mapping[int, tuple[str, nn.Module, type]]
    functions: tuple[tuple[str, object, object], ...]

    @classmethod
    def of(
        cls,
        reads: Mapping[tuple[int, str], nn.Module],
        originals: Mapping[int, tuple[str, nn.Module]],
        known: frozenset[tuple[str, str]],
        loss_fn: object,
    ) -> Reads:
        """Take snapshots of what was read.

        Args:
            reads: module and attribute of every read while capturing.
            originals: for the id of each copied module, the original's name and the original. Others that
                were read, such as those that a loss function's closure holds, stand for themselves.
            known: owner and attribute of the tensors that are inputs of the step.
            loss_fn: the user's.
        """
        attributes = []
        classes: dict[int, tuple[str, nn.Module, type]] = {}
        for (identity, key), module in reads.items():
            made_by_tracing = isinstance(module, fx.GraphModule) or type(module) is nn.Module
            if identity not in originals and made_by_tracing:
                continue
            name, original = originals.get(identity, (type(module).__name__, module))
            if key.startswith("__") or key in _NOT_GUARDED:
                continue
            classes.setdefault(id(original), (name or type(original).__name__, original, type(original)))
            is_input = (name, key) in known
            recomputed = torch_compat.module_hooks(original) and not is_input
            if recomputed and isinstance(find(original, key)[1], torch.Tensor):
                continue  # weight_norm and spectral_norm recompute it in their hook at every call
            label = f"{name}.{key}" if name else key
            attributes.append(GuardedAttribute.of(label, original, key, is_input))
        methods = user_methods((attribute.module, attribute.key) for attribute in attributes)
        roots: list[tuple[str, object]] = [("loss_fn", loss_fn)]
        called = function_behind(loss_fn) or function_behind(type(loss_fn).__dict__.get("__call__"))
        roots += [("loss_fn", called)] if called not in (None, loss_fn) else []
        roots += [(f"what {method.__qualname__} reads", method) for method in methods]
        functions = tuple((label, root, _function_snapshot(root)) for label, root in roots)
        return cls(tuple(attributes), classes, functions)

    def changed(self) -> str | None:
        """Return what is no longer as it was read; None if nothing changed."""
        for name, module, kind in self.classes.values():
            if type(module) is not kind:
                return f"the class of {name} changed"
        snapshots: dict[int, object] = {}
        for attribute in self.attributes:
            if attribute.has_changed(snapshots):
                return f"{attribute.label} changed"
        for label, root, snapshot in self.functions:
            if _function_snapshot(root) != snapshot:
                return f"{label} changed"
        return None


def _function_snapshot(root: object) -> object:
    """Take a snapshot of what a function reads, or of another object itself."""
    return snapshot_of(function_values(root) or root)


def user_methods(reads: Iterable[tuple[nn.Module, str]]) -> list[types.FunctionType]:
    """Return the functions of the user's code behind attributes of modules, overridden ones included."""
    values: dict[int, object] = {}
    for module, key in reads:
        for holder in (module, *type(module).__mro__):
            value = holder.__dict__.get(key)
            values[id(value)] = value
    functions = [function_behind(value) for value in values.values()]
    return [function for function in dict.fromkeys(functions) if function and is_users(function)]
