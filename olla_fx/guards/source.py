"""Writes the prologue of a plan: one Python function that gathers its inputs and checks everything.

The prologue is the first tier of the guards, as in Lightning Thunder: straight-line code without loops, in
which every check is an identity test on the very object that was there when the exact comparison
(:mod:`olla_fx.guards.exact`) last found the plan to fit. A test that fails proves nothing, for the new object
may be equal. The prologue returns None then, or raises what a missing attribute raises.

Attributes are read from the modules' own dictionaries, and what their classes have under the same names is
checked once for every class: together they decide what Python's attribute lookup finds.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.exact import ExactComparison
from olla_fx.guards.functions import followed_functions, global_names
from olla_fx.guards.inputs import Mode, Role, modules_within
from olla_fx.guards.optimizer import OptimizerGuard
from olla_fx.guards.reads import CLASS, OWN, TABLES, GuardedAttribute, find
from olla_fx.guards.snapshot import CONTAINERS, Identities, are_different, is_immutable, is_plain, snapshot_of

_MOST_SINGLE_LOOKUPS = 8
"""Up to so many names looking each up in a dictionary takes less time than comparing its keys with a set."""


def prologue_source(
    exact: ExactComparison, optimizer: OptimizerGuard | None, loss_fn: object
) -> tuple[str, dict[str, Any]]:
    """Write the prologue for the present state of a model, which is known to fit.

    Args:
        exact: compares the model.
        optimizer: compares the optimizer, if there is one.
        loss_fn: the user's, or None.

    Returns:
        The text of a function ``prologue()``, and the objects by the names that it uses. It returns the
        step's tensors, and the values of all placeholders before the caller's inputs, or None.
    """
    writer = _Writer()
    writer.write_settings(exact)
    writer.write_modules(exact)
    writer.write_classes(exact)
    writer.write_functions(exact, loss_fn)
    tensors = writer.write_tensors(exact)
    if optimizer is None:
        values = tensors
    else:
        tensors, values = writer.write_optimizer(optimizer, exact)
    writer.lines += [
        f"    tensors = [{', '.join(tensors)}]",
        "    if not fit(*tensors):",
        "        return None",
        f"    return tensors, {'tensors' if values is tensors else '[' + ', '.join(values) + ']'}",
    ]
    return "\n".join([*writer.lines, ""]), writer.objects


class _Writer:
    """Text under construction, and the objects that it names."""

    def __init__(self) -> None:
        self.lines = ["def prologue():"]
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._looked_into: set[int] = set()
        self._tensors: dict[tuple[int, str, str], str] = {}

    def name(self, prefix: str, value: object) -> str:
        """Return the name of an object; a literal for None, True and False."""
        if value is None or value is True or value is False:
            return repr(value)
        name = self._names.get(id(value), f"{prefix}{len(self.objects)}")
        self.objects[name] = value
        if prefix != "v":  # equal numbers may become one object, and the text is to stay the same
            self._names[id(value)] = name
        return name

    def refuse_if(self, conditions: Iterable[str], comment: str = "") -> None:
        """Let the prologue return None if any of some conditions holds."""
        conditions = list(conditions)
        if conditions:
            self.lines += [f"    # {comment!r}"] if comment else []
            self.lines += [f"    if {' or '.join(conditions)}:", "        return None"]

    def write_settings(self, exact: ExactComparison) -> None:
        """Check what is no part of model or optimizer."""
        assumed = exact.assumed
        functions = (torch_compat.kernel_settings, torch_compat.autocast_state)
        settings, autocast = (self.name("call", function) for function in functions)
        hooks = self.name("call", torch_compat.any_global_module_hooks)
        conditions = [f"{settings}() != {self.name('settings', assumed.kernel_settings)}", f"{hooks}()"]
        device = self.name("device", assumed.device)
        if assumed.autocast[0]:
            conditions.append(f"{autocast}({device}) != {self.name('autocast', assumed.autocast)}")
        else:
            conditions.append(f"{autocast}({device})[0]")
        self.refuse_if(conditions, "settings")

    def write_modules(self, exact: ExactComparison) -> None:
        """Check every module's class, training flag, hooks, children and attributes, and read its tensors."""
        attributes: dict[int, list[GuardedAttribute]] = {}
        for attribute in exact.assumed.reads.attributes:
            attributes.setdefault(id(attribute.module), []).append(attribute)
        tensors: dict[int, list[tuple[str, str]]] = {}
        places = [(module, slot) for slot, module, _ in exact.slots]
        for module, slot in (*places, *(alias[2:] for alias in exact.aliases)):
            tensors.setdefault(id(module), []).append((slot.table_name, slot.key))
        for name, module in exact.modules.items():
            conditions = self._module_conditions(module, exact.assumed.module_training[name])
            conditions += self._hook_conditions(module, exact.hooks[name])
            conditions += self._attribute_conditions(module, attributes.pop(id(module), []), own=True)
            self._write_module(name or type(module).__name__, module, conditions, tensors.get(id(module), []))
        for guarded in attributes.values():  # of modules that are no part of the step
            module = guarded[0].module
            conditions = self._attribute_conditions(module, guarded, own=False)
            self._write_module(guarded[0].label, module, conditions, [])

    def _write_module(
        self, name: str, module: nn.Module, conditions: list[str], tensors: list[tuple[str, str]]
    ) -> None:
        self.lines += [f"    # {name!r}", f"    d = {self.name('m', module)}.__dict__"]
        self.refuse_if(conditions)
        for table, key in tensors:
            local = self._tensors.setdefault((id(module), table, key), f"t{len(self._tensors)}")
            self.lines.append(
                f"    {local} = " + (f"d[{key!r}]" if table == OWN else f"d[{table!r}][{key!r}]")
            )

    def _module_conditions(self, module: nn.Module, training: bool) -> list[str]:
        children = "d['_modules']"
        if present := torch_compat.children_of(module):
            children = f"(*{children}.items(),) != {self.name('children', tuple(present.items()))}"
        return [f"d['training'] is not {self.name('v', training)}", children]

    def _hook_conditions(self, module: nn.Module, hooks: list[Any]) -> list[str]:
        if not hooks:
            return [f"d[{table!r}]" for table in torch_compat.MODULE_HOOK_TABLES]
        function = self.name("call", torch_compat.module_hooks)
        return [f"{function}({self.name('m', module)}) != {self.name('hooks', hooks)}"]

    def _attribute_conditions(
        self, module: nn.Module, attributes: list[GuardedAttribute], *, own: bool
    ) -> list[str]:
        """Return when something was replaced or is hidden; ``own`` modules' children are checked already."""
        if not attributes:
            return []
        conditions = [f"type({self.name('m', module)}) is not {self.name('class_', type(module))}"]
        keys = [attribute.key for attribute in attributes if attribute.key not in module.__dict__]
        if len(keys) > _MOST_SINGLE_LOOKUPS:
            conditions.append(f"not d.keys().isdisjoint({self.name('keys', frozenset(keys))})")
        else:
            conditions += [f"{key!r} in d" for key in keys]
        for attribute in attributes:
            key, (where, value) = attribute.key, find(module, attribute.key)
            if where == "":
                conditions += [f"{key!r} in d[{table!r}]" for table in TABLES]
            elif where != CLASS and not attribute.is_input and not (own and where == "_modules"):
                present = f"d[{key!r}]" if where == OWN else f"d[{where!r}][{key!r}]"
                conditions += self._replaced(present, value)
        return conditions

    def _replaced(self, present: str, value: object) -> list[str]:
        """Return when an expression no longer gives an object, or something in that was replaced."""
        planned = self.name("v", value)
        condition = f"{present} is not {planned}"
        if isinstance(value, float):  # computed anew at every step, maybe
            condition = f"({condition} and {self.name('call', are_different)}({present}, {planned}))"
        return [condition, *self._within(value)]

    def _within(self, value: object) -> list[str]:
        """Return the condition under which something in an object was replaced, once for each object."""
        if is_immutable(value) or id(value) in self._looked_into:
            return []
        self._looked_into.add(id(value))
        try:
            identities = Identities(value)
        except LookupError:
            snapshot = self.name("call", snapshot_of)
            return [f"{snapshot}({self.name('v', value)}) != {self.name('snapshot', snapshot_of(value))}"]
        return [f"not {self.name('identities', identities)}.are_unchanged()"]

    def write_classes(self, exact: ExactComparison) -> None:
        """Check for every class what it has of its own under the names that were read from its instances."""
        keys: dict[type, dict[str, None]] = {}
        for attribute in exact.assumed.reads.attributes:
            for kind in type(attribute.module).__mro__[:-1]:  # all but object
                keys.setdefault(kind, {})[attribute.key] = None
        for kind, names in keys.items():
            own = [key for key in names if key in kind.__dict__]
            absent = frozenset(names) - kind.__dict__.keys()
            self.lines.append(f"    d = {self.name('class_', kind)}.__dict__")
            conditions = [f"d[{key!r}] is not {self.name('v', kind.__dict__[key])}" for key in own]
            if absent:
                conditions.append(f"not d.keys().isdisjoint({self.name('absent', absent)})")
            containers = [kind.__dict__[key] for key in own if isinstance(kind.__dict__[key], CONTAINERS)]
            for value in containers:
                conditions += self._within(value)
            self.refuse_if(conditions)

    def write_functions(self, exact: ExactComparison, loss_fn: object) -> None:
        """Check what the user's functions read beside their arguments."""
        functions = [
            function for _, root, _ in exact.assumed.reads.functions for function in followed_functions(root)
        ]
        for function in dict.fromkeys(functions):
            self.refuse_if(self._function_conditions(function), function.__qualname__)
        if not is_plain(loss_fn) and not isinstance(loss_fn, types.FunctionType | nn.Module):
            modules = f"{self.name('call', modules_within)}({self.name('loss', loss_fn)})"
            moved = f"{modules} != {self.name('modules', modules_within(loss_fn))}"
            self.refuse_if([*self._within(loss_fn), moved], "loss_fn")

    def _function_conditions(self, function: types.FunctionType) -> list[str]:
        conditions, name = [], self.name("f", function)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet: asked for again, it raises, and the prologue gives up
                value = None
            conditions += self._replaced(f"{self.name('cell', cell)}.cell_contents", value)
        present = function.__globals__
        variables = self.name("globals_", present)
        absent = []
        for key in global_names(function.__code__):
            if key not in present:
                absent.append(key)
                continue
            conditions += self._replaced(f"{variables}[{key!r}]", present[key])
        if absent:
            conditions.append(f"not {variables}.keys().isdisjoint({self.name('absent', frozenset(absent))})")
        for attribute in ("__defaults__", "__kwdefaults__"):
            conditions += self._replaced(f"{name}.{attribute}", getattr(function, attribute))
        return conditions

    def write_tensors(self, exact: ExactComparison) -> list[str]:
        """Check ties and gradient hooks; returns the names of the model's tensors, in order."""
        names = [self._tensors[id(module), slot.table_name, slot.key] for slot, module, _ in exact.slots]
        for first_module, first, module, other in exact.aliases:
            tied = self._tensors[id(first_module), first.table_name, first.key]
            copy = self._tensors[id(module), other.table_name, other.key]
            self.refuse_if([f"{copy} is not {tied}"])
        slots = zip(names, exact.slots, strict=True)
        parameters = [name for name, (slot, _, _) in slots if slot.role is Role.PARAMETER]
        if exact.assumed.mode is Mode.TRAINING:
            function = self.name("call", torch_compat.any_tensor_hooks)
            self.refuse_if([f"{function}([{', '.join(parameters)}])"], "gradient hooks")
        return names

    def write_optimizer(self, guard: OptimizerGuard, exact: ExactComparison) -> tuple[list[str], list[str]]:
        """Check groups, numbers and state; returns the names of all tensors and of all values, in order."""
        slots = [(slot.name, (id(module), slot.table_name, slot.key)) for slot, module, _ in exact.slots]
        locals_ = {name: self._tensors[place] for name, place in slots}
        optimizer, is_tensor = self.name("optimizer", guard.optimizer), self.name("call", torch.is_tensor)
        hooks, same = (
            self.name("call", function) for function in (torch_compat.has_optimizer_pre_hooks, operator.is_)
        )
        layout = guard.layout
        self.lines += ["    # optimizer", f"    groups = {optimizer}.param_groups"]
        self.refuse_if([f"{hooks}({optimizer})", f"len(groups) != {len(layout.parameters)}"])
        for index, names in enumerate(layout.parameters):
            self.lines += [f"    g{index} = groups[{index}]", f"    params = g{index}['params']"]
            planned = "".join(f"{locals_[name]}, " for name in names)
            conditions = [f"len(params) != {len(names)}", f"not all(map({same}, params, ({planned})))"]
            group = guard.optimizer.param_groups[index]
            for key, _ in layout.constants[index]:
                conditions.append(f"g{index}[{key!r}] is not {self.name('v', group[key])}")
            self.refuse_if(conditions)
        state = self._write_state(guard, locals_)
        numbers, checked = [], set()
        for slot in layout.scalars:
            number = f"g{slot.group}[{slot.key!r}]" + ("" if slot.element is None else f"[{slot.element}]")
            numbers.append(f"float({number})")
            if number not in checked:
                self.refuse_if([f"{is_tensor}({number})", f"not {number} {'>' if slot.positive else '<'} 0"])
                checked.add(number)
        tensors = [f"g{each.group}[{each.key!r}]" for each in layout.tensors]
        own = list(locals_.values())
        return [*own, *state, *tensors], [*own, *state, *numbers, *tensors]

    def _write_state(self, guard: OptimizerGuard, locals_: dict[str, str]) -> list[str]:
        """Read the state of every trained parameter; returns the names of its tensors, in order."""
        state: list[str] = []
        self.lines.append(f"    get = {self.name('optimizer', guard.optimizer)}.state.get")
        for name, _, _, keys in guard.state:
            if not keys:
                self.refuse_if([f"get({locals_[name]})"])
                continue
            self.lines.append(f"    s = get({locals_[name]})")
            self.refuse_if([f"len(s) != {len(keys)}"])
            for key in keys:
                self.lines.append(f"    s{len(state)} = s[{key!r}]")
                state.append(f"s{len(state)}")
        return state
