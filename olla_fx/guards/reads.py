"""The Python values that a captured step read: attributes of modules, and what functions read.

``dropout.p``, ``bn.momentum``, a loss's weight on a term, a global constant: tracing reads such values
once and bakes them. While capturing, every attribute that is read from a module is noted
(:func:`olla_fx.torch_compat.attribute_reads`). Only those are guarded, so that a training loop may keep its
own counters on the model.

The border: values are followed that the loss and the modules' own code read from attributes of modules and
of objects, closures, defaults and global variables of the user's code, through functions that it calls, a few
deep.
Not followed are installed packages (libraries keep caches in global variables), attributes of Python
modules (``settings.rate``), files and the environment.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.guards import other_libraries
from olla_fx.guards.inputs import Facts
from olla_fx.guards.numbers import (
    NO_NUMBERS,
    LateBinding,
    NumberFinder,
    NumberSlot,
    cell_or_globals,
    is_number,
)
from olla_fx.guards.snapshot import CONTAINERS, PLAIN, FieldsRead, Same, snapshot_of

MODULE_TABLES = (
    frozenset(nn.Module().__dict__)
    | frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__)
    | {"_flat_weights", "_flat_weight_refs", "_compiled_call_impl"}
)
"""Attributes by which modules and traced modules work; what they hold is found and compared by name."""

_SPECIAL = ("__call__", "__getattr__", "__getitem__")
"""Methods that Python calls without looking them up on the object."""

_NOT_GUARDED = MODULE_TABLES | other_libraries.HARMLESS_ATTRIBUTES
_DEEPEST_CALL = 4
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

ABSENT = object()
"""Stands for an attribute or a variable that does not exist."""

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
        owner: the module's name.
        module: whose it is.
        key: its name.
        is_input: True for a tensor that is an input of the step, whose value may change.
    """

    owner: str
    module: nn.Module
    key: str
    is_input: bool

    @property
    def name(self) -> str:
        """Its dotted path."""
        return f"{self.owner}.{self.key}".lstrip(".")

    def snapshot(self, known: dict[int, object], numbers: NumberFinder) -> object:
        """Take a snapshot of the value, or of its place; ``known`` ones, by identity, are shared.

        Args:
            known: snapshots so far.
            numbers: notes the numbers, which are left out.
        """
        where, value = find(self.module, self.key)
        if where == CLASS and not isinstance(value, (*PLAIN, *CONTAINERS)):
            return Same(value)  # descriptors may keep values of all instances
        if self.is_input:
            return where
        path = (("field", self.key),)
        if where == OWN and is_number(value):
            return numbers.note(NumberSlot(self.name, self.module, path), self.module, value)
        if id(value) not in known:
            known[id(value)] = (
                numbers.snapshot(self.name, self.module, path, value)
                if where == OWN
                else snapshot_of(value, fields=numbers.fields)
            )
        return known[id(value)]


@dataclass(frozen=True)
class Reads:
    """Everything that was read.

    Attributes:
        attributes: of modules.
        functions: the loss, the user's methods that modules ran, and the numbers among the inputs, each after
            its name.
        late: the numbers among them that are inputs of the graph.
        fields: what was read from objects that are no modules.
    """

    attributes: tuple[GuardedAttribute, ...]
    functions: tuple[tuple[str, object], ...]
    late: LateBinding = NO_NUMBERS
    fields: FieldsRead = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        reads: Mapping[tuple[int, str], nn.Module],
        originals: Mapping[int, tuple[str, nn.Module]],
        known: frozenset[tuple[str, str]],
        loss_fn: object,
        numbers: Mapping[str, object] | None,
        fields: FieldsRead,
        fields_called: Iterable[types.FunctionType],
    ) -> Reads:
        """Choose what is to be guarded.

        Args:
            reads: module and attribute of every read while capturing.
            originals: for the id of each copied module, the original's name and the original. Others that
                were read, such as those that a loss function's closure holds, stand for themselves.
            known: owner and attribute of the tensors that are inputs of the step.
            loss_fn: the user's.
            numbers: those among the inputs of the present call, in a dictionary; None for none.
            fields: what was read from objects that are no modules.
            fields_called: the functions among that.
        """
        attributes = []
        for (identity, key), module in reads.items():
            made_by_tracing = isinstance(module, fx.GraphModule) or type(module) is nn.Module
            if identity not in originals and made_by_tracing:
                continue
            name, original = originals.get(identity, (type(module).__name__, module))
            if key.startswith("__") or key in _NOT_GUARDED:
                continue
            is_input = (name, key) in known
            recomputed = torch_compat.module_hooks(original) and not is_input
            if recomputed and isinstance(find(original, key)[1], torch.Tensor):
                continue  # weight_norm and spectral_norm recompute it in their hook at every call
            attributes.append(GuardedAttribute(name, original, key, is_input))
        read = [(value, attribute.key) for attribute in attributes for value in holders(attribute.module)]
        for kind, keys in fields.items():
            read += [(base, key) for base in kind.__mro__ for key in (*keys, *_SPECIAL)]
        called = [function for function in fields_called if _is_users(function)]
        methods = [*dict.fromkeys([*user_methods(read), *called])]
        behind = function_called(loss_fn)
        functions: list[tuple[str, object]] = [("loss_fn", loss_fn)]
        functions += [("loss_fn", behind)] if behind not in (None, loss_fn) else []
        functions += [(f"what {method.__qualname__} reads", method) for method in methods]
        functions += [("input", numbers)] if numbers else []
        return cls(tuple(attributes), tuple(functions), fields=fields)

    def facts(self) -> Facts:
        """Yield what is said if a value changed, and a snapshot of the value.

        Numbers that may be bound late have a fact each, after all others.
        """
        numbers = NumberFinder(self.fields)
        yield from self._facts(numbers)
        yield from numbers.facts(self.late)
        yield from self.late.facts()

    def numbers(self) -> list[tuple[NumberSlot, float]]:
        """Return all numbers that may be bound late, with their present values."""
        numbers = NumberFinder(self.fields)
        for _ in self._facts(numbers):
            pass
        return list(numbers.slots.values())

    def _facts(self, numbers: NumberFinder) -> Facts:
        known: dict[int, object] = {}
        for attribute in self.attributes:
            yield f"the class of {attribute.owner or 'the model'} changed", type(attribute.module)
            yield f"{attribute.name} changed", attribute.snapshot(known, numbers)
        for label, root in self.functions:
            yield f"{label} changed", _function_snapshot(label, root, numbers)


def _function_snapshot(label: str, root: object, numbers: NumberFinder) -> object:
    """Take a snapshot of what a function and those that it reaches read, or of an object that is called."""
    functions = followed_functions(root)
    if not functions:
        return numbers.snapshot(label, root, (), root)
    read: dict[str, object] = {}
    for index, function in enumerate(functions):
        for name, holder, _, value in variables(function):
            named = f"{function.__qualname__}[{index}].{name}" if index else name
            path = cell_or_globals(holder, name)
            if not path:
                read[named] = snapshot_of(value, depth=1, fields=numbers.fields)
            elif is_number(value):
                read[named] = numbers.note(NumberSlot(f"{label}: {named}", holder, path), holder, value)
            else:
                read[named] = numbers.snapshot(f"{label}: {named}", holder, path, value, depth=1)
    return read


def holders(module: nn.Module) -> tuple[object, ...]:
    """Return what may hold the functions behind a module's attributes, overridden ones included."""
    return module, *type(module).__mro__


def function_called(loss_fn: object) -> types.FunctionType | None:
    """Return the function behind a loss, which may be a method or an object that is called."""
    return function_behind(loss_fn) or function_behind(type(loss_fn).__dict__.get("__call__"))


def user_methods(reads: Iterable[tuple[object, str]]) -> list[types.FunctionType]:
    """Return the functions of the user's code among what objects and classes hold under some names."""
    values: dict[int, object] = {}
    for holder, key in reads:
        value = holder.__dict__.get(key)
        values[id(value)] = value
    functions = [function for function in map(function_behind, values.values()) if function]
    # A library's decorator, such as torch.autocast, keeps the user's function within its own.
    functions += [function_behind(inspect.unwrap(function)) or function for function in functions]
    return [function for function in dict.fromkeys(functions) if _is_users(function)]


def function_behind(value: object) -> types.FunctionType | None:
    """Return the plain function of a method, property, class or static method; None of anything else."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def followed_functions(root: object) -> list[types.FunctionType]:
    """Return a function and those of the user's that it reaches by closure, defaults or global variables.

    Args:
        root: anything; only plain functions that are not torch's have any.
    """
    followed: dict[types.FunctionType, None] = {}
    level = [root] if isinstance(root, types.FunctionType) and not _is_torchs(root) else []
    for _ in range(_DEEPEST_CALL):
        followed.update(dict.fromkeys(level))
        reached = [value for function in level for *_, value in variables(function)]
        level = [
            value
            for value in reached
            if isinstance(value, types.FunctionType) and value not in followed and _is_users(value)
        ]
    return list(followed)


def function_values(root: object) -> dict[str, object]:
    """Return what a function and those that it reaches read beside their arguments, by name."""
    return {
        f"{function.__qualname__}[{index}].{name}" if index else name: value
        for index, function in enumerate(followed_functions(root))
        for name, _, _, value in variables(function)
    }


def variables(function: types.FunctionType) -> Iterator[tuple[str, object, str, object]]:
    """Yield what one function reads beside its arguments: name, holder, access to the holder, value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell, ".cell_contents", cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, cell, ".cell_contents", ABSENT
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name, ABSENT)
        yield name, function.__globals__, f".get({name!r}, ABSENT)", value
    for name in ("__defaults__", "__kwdefaults__"):
        yield f"({name.strip('_')})", function, f".{name}", getattr(function, name)


def _is_users(function: types.FunctionType) -> bool:
    """Return True for a function that belongs to no installed package."""
    path = function.__code__.co_filename
    installed = path.startswith(_STANDARD_LIBRARY) or any(folder in path for folder in _PACKAGES)
    return not installed and not _is_torchs(function)


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global variables that some code reads, in comprehensions and inner functions, too."""
    names = [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return tuple(dict.fromkeys(names))
