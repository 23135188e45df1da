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
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.exact import Assumptions, ExactComparison
from olla_fx.guards.inputs import Mode, Role, TensorSlot
from olla_fx.guards.numbers import LateBinding, Place
from olla_fx.guards.optimizer import OptimizerGuard
from olla_fx.guards.reads import (
    ABSENT,
    CLASS,
    OWN,
    TABLES,
    GuardedAttribute,
    find,
    followed_functions,
    variables,
)
from olla_fx.guards.snapshot import CONTAINERS, FieldsRead, is_immutable, snapshot_of
from olla_fx.torch_compat import Expression


def prologue_source(exact: ExactComparison, optimizer: OptimizerGuard | None) -> tuple[str, dict[str, Any]]:
    """Write the prologue for the present state of a model, which is known to fit.

    Args:
        exact: compares the model.
        optimizer: compares the optimizer, if there is one.

    Returns:
        The text of a function ``prologue()``, and the objects by the names that it uses. It returns the
        step's tensors, and the values of all placeholders before the caller's inputs, or None.
    """
    assumed = exact.assumed
    writer = _Writer(assumed.reads.late.places(), assumed.reads.fields)
    writer.write_settings(assumed)
    writer.write_modules(exact)
    writer.write_classes(assumed.reads.attributes)
    writer.write_functions(assumed.reads.functions)
    late = writer.write_numbers(assumed.reads.late)
    locals_ = writer.write_tensors(assumed)
    tensors, of_optimizer = list(locals_.values()), list[str]()
    if optimizer is not None:
        state, numbers, hyperparameters = writer.write_optimizer(optimizer, locals_)
        tensors += [*state, *hyperparameters]
        of_optimizer = [*state, *numbers, *hyperparameters]
    writer.lines += [
        f"    tensors = [{', '.join(tensors)}]",
        "    if not fit(*tensors):",
        "        return None",
        f"    return tensors, [{', '.join([*locals_.values(), *of_optimizer, *late])}]",
    ]
    return "\n".join([*writer.lines, ""]), writer.objects


class _Writer:
    """Text under construction, and the objects that it names."""

    def __init__(self, late: frozenset[Place], fields: FieldsRead) -> None:
        self._late = late
        self._fields = fields
        self.lines = ["def prologue():"]
        self.objects: dict[str, Any] = {"ABSENT": ABSENT}
        self._names: dict[int, str] = {}
        self._looked_into: set[int] = set()
        self._tensors: dict[TensorSlot, str] = {}

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

    def write_settings(self, assumed: Assumptions) -> None:
        """Check what is no part of model or optimizer."""
        settings = torch_compat.tracing_settings, torch_compat.kernel_settings
        hooks = torch_compat.any_global_module_hooks
        autocast = torch_compat.autocast_state(assumed.device)
        present = f"{self.name('call', torch_compat.autocast_state)}({self.name('device', assumed.device)})"
        self.refuse_if(
            [
                *(f"{self.name('call', read)}() != {self.name('settings', read())}" for read in settings),
                f"{self.name('call', hooks)}()",
                f"{present} != {self.name('autocast', autocast)}" if autocast[0] else f"{present}[0]",
            ],
            "settings",
        )

    def write_modules(self, exact: ExactComparison) -> None:
        """Check every module's class, training flag, hooks, children and attributes, and read its tensors."""
        modules = {id(module): (name, module) for name, module in exact.modules.items()}
        attributes: dict[int, list[GuardedAttribute]] = {}
        for guarded in exact.assumed.reads.attributes:
            attributes.setdefault(id(guarded.module), []).append(guarded)
            modules.setdefault(id(guarded.module), (guarded.owner, guarded.module))  # no part of the step
        slots: dict[str, list[TensorSlot]] = {}
        for slot in (slot for places in exact.assumed.slots for slot in places):
            slots.setdefault(slot.owner, []).append(slot)
        for identity, (name, module) in modules.items():
            self.lines += [f"    # {name or type(module).__name__!r}"]
            self.lines += [f"    d = {self.name('m', module)}.__dict__"]
            own = self._module_conditions(module)
            self.refuse_if([*own, *self._attribute_conditions(module, attributes.get(identity, []))])
            for slot in slots.get(name, ()) if module is exact.modules.get(name) else ():
                self._tensors[slot] = f"t{len(self._tensors)}"
                table = "d" if slot.table_name == OWN else f"d[{slot.table_name!r}]"
                self.lines.append(f"    {self._tensors[slot]} = {table}[{slot.key!r}]")

    def _module_conditions(self, module: nn.Module) -> list[str]:
        children = "d['_modules']"
        if own := torch_compat.children_of(module):
            children = f"(*{children}.items(),) != {self.name('children', tuple(own.items()))}"
        conditions = [f"d['training'] is not {self.name('v', module.training)}", children]
        hooks = torch_compat.module_hooks(module)
        if not hooks:
            return conditions + [f"d[{table!r}]" for table in torch_compat.MODULE_HOOK_TABLES]
        present = f"{self.name('call', torch_compat.module_hooks)}({self.name('m', module)})"
        return [*conditions, f"{present} != {self.name('hooks', hooks)}"]

    def _attribute_conditions(self, module: nn.Module, attributes: list[GuardedAttribute]) -> list[str]:
        """Return when something was replaced or is hidden; children are checked already."""
        if not attributes:
            return []
        conditions = [f"type({self.name('m', module)}) is not {self.name('class_', type(module))}"]
        keys = (attribute.key for attribute in attributes)
        conditions += [f"{key!r} in d" for key in keys if key not in module.__dict__]
        for attribute in attributes:
            key, (where, value) = attribute.key, find(module, attribute.key)
            if where == "":
                conditions += [f"{key!r} in d[{table!r}]" for table in TABLES]
            elif (id(module), key) in self._late:
                continue
            elif where not in (CLASS, "_modules") and not attribute.is_input:
                conditions += self._replaced(
                    f"d[{key!r}]" if where == OWN else f"d[{where!r}][{key!r}]", value
                )
        return conditions

    def _replaced(self, present: str, value: object) -> list[str]:
        """Return when an expression no longer gives an object, or something in that was replaced."""
        condition = f"{present} is not {self.name('v', value)}"
        if isinstance(value, float):  # computed anew at every step, maybe
            condition = f"({condition} and {self._differs(present, value)})"
        return [condition, *self._within(value)]

    def _within(self, value: object) -> list[str]:
        """Return the condition under which something in an object was replaced, once for each object."""
        if is_immutable(value) or id(value) in self._looked_into:
            return []
        self._looked_into.add(id(value))
        return [self._differs(self.name("v", value), value)]

    def _differs(self, present: str, value: object) -> str:
        taken = self.name("call", snapshot_of)
        planned = snapshot_of(value, fields=self._fields)
        without = snapshot_of(value, without=self._late, fields=self._fields) if self._late else planned
        options = f", fields={self.name('fields', self._fields)}" if self._fields else ""
        if without != planned:
            options += f", without={self.name('late', self._late)}"
        return f"{taken}({present}{options}) != {self.name('snapshot', without)}"

    def write_classes(self, attributes: Iterable[GuardedAttribute]) -> None:
        """Check for every class what it has of its own under the names that were read from its instances."""
        keys: dict[type, dict[str, None]] = {}
        for attribute in attributes:
            for kind in type(attribute.module).__mro__[:-1]:  # all but object
                keys.setdefault(kind, {})[attribute.key] = None
        for kind, names in keys.items():
            self.lines.append(f"    d = {self.name('class_', kind)}.__dict__")
            own = {key: kind.__dict__[key] for key in names if key in kind.__dict__}
            conditions = [f"d[{key!r}] is not {self.name('v', value)}" for key, value in own.items()]
            if absent := frozenset(names) - own.keys():
                conditions.append(f"not d.keys().isdisjoint({self.name('absent', absent)})")
            for value in own.values():
                conditions += self._within(value) if isinstance(value, CONTAINERS) else []
            self.refuse_if(conditions)

    def write_functions(self, roots: Iterable[tuple[str, object]]) -> None:
        """Check what the user's functions read beside their arguments, and the loss if it is an object."""
        functions = dict.fromkeys(function for _, root in roots for function in followed_functions(root))
        for function in functions:
            conditions = []
            for name, holder, access, value in variables(function):
                if (id(holder), name) in self._late:
                    continue
                conditions += self._replaced(f"{self.name('holder', holder)}{access}", value)
            self.refuse_if(conditions, function.__qualname__)
        for label, root in roots:
            self.refuse_if(self._within(root), label)

    def write_numbers(self, late: LateBinding) -> list[str]:
        """Read the late-bound numbers, check what the graph assumes of them; returns their local names."""
        if not late.slots:
            return []
        self.lines.append("    # numbers")
        names = [f"n{index}" for index in range(len(late.slots))]
        conditions = []
        for name, slot, kind in zip(names, late.slots, late.types, strict=True):
            holder, (step, key) = self.name("holder", slot.holder()), slot.path[-1]
            access = {"cell": ".cell_contents", "field": f".__dict__[{key!r}]"}.get(step, f"[{key!r}]")
            self.lines.append(f"    {name} = {holder}{access}")
            fits = f"{name} - {name} == 0.0" if kind is float else f"-{1 << 63} < {name} < {1 << 63}"
            conditions.append(f"type({name}) is not {self.name('type', kind)} or not {fits}")
        self.refuse_if(conditions)
        for decision in late.decisions:
            asked = self._expression(decision.question, names)
            self.refuse_if([f"not {asked}" if decision.answer else asked])
        return names

    def _expression(self, expression: object, names: list[str]) -> str:
        if not isinstance(expression, Expression):
            return f"float('{expression}')" if isinstance(expression, float) else repr(expression)
        if expression.function is None:
            index: int = expression.arguments[0]
            return names[index]
        arguments = ", ".join(self._expression(argument, names) for argument in expression.arguments)
        return f"{self.name('call', expression.function)}({arguments})"

    def write_tensors(self, assumed: Assumptions) -> dict[str, str]:
        """Check ties and gradient hooks; returns the local names of the model's tensors, in order."""
        locals_ = {first.name: self._tensors[first] for first, *_ in assumed.slots}
        self.refuse_if(
            f"{self._tensors[alias]} is not {locals_[first.name]}"
            for first, *aliases in assumed.slots
            for alias in aliases
        )
        parameters = [locals_[first.name] for first, *_ in assumed.slots if first.role is Role.PARAMETER]
        if assumed.mode is Mode.TRAINING:
            function = self.name("call", torch_compat.any_tensor_hooks)
            self.refuse_if([f"{function}([{', '.join(parameters)}])"], "gradient hooks")
        return locals_

    def write_optimizer(
        self, guard: OptimizerGuard, locals_: dict[str, str]
    ) -> tuple[list[str], list[str], list[str]]:
        """Check groups, numbers and state; returns expressions of state, numbers and tensors, in order."""
        optimizer, layout = self.name("optimizer", guard.optimizer), guard.layout
        hooks = self.name("call", torch_compat.has_optimizer_pre_hooks)
        same, is_tensor = self.name("call", operator.is_), self.name("call", torch.is_tensor)
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
        state: list[str] = []
        self.lines.append(f"    get = {optimizer}.state.get")
        for _, _, name, keys in guard.state:
            self.lines.append(f"    s = get({locals_[name]}) or ()")
            self.refuse_if([f"len(s) != {len(keys)}"])
            for key in keys:
                self.lines.append(f"    s{len(state)} = s[{key!r}]")
                state.append(f"s{len(state)}")
        numbers, signs = [], dict[str, None]()
        for slot in layout.scalars:
            number = f"g{slot.group}[{slot.key!r}]" + ("" if slot.element is None else f"[{slot.element}]")
            numbers.append(number)
            signs[f"{is_tensor}({number}) or not {number} {'>' if slot.positive else '<'} 0"] = None
        self.refuse_if(signs)
        return (
            state,
            [f"float({number})" for number in numbers],
            [f"g{tensor.group}[{tensor.key!r}]" for tensor in layout.tensors],
        )
