"""The Python numbers that a captured step read: where each is kept, and those that are bound late.

A number that a loop changes (a loss's weight that is annealed, a temperature, a counter of steps) is kept
in an attribute, in a closure's or a global variable, or in a dictionary, a list or an object in reach of
one. A number that is *bound late* is read from there at every call and handed to the graph; only its type,
and the decisions that the traced code took by it, are guarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import nn

from olla_fx.guards.snapshot import DEEPEST, FieldsRead, Same, one_step, snapshot_of, steps_of
from olla_fx.torch_compat import Decision

Step = tuple[str, Any]
"""How an object leads to another: ``field`` of its ``__dict__``, ``item``, ``cell`` or ``attribute``."""
Place = tuple[int, Any]
"""What tells where a number is: the identity of the object that holds it, and the last step's name."""

_LARGEST_INTEGER = (1 << 63) - 1
_NUMBER = "a number"


def is_number(value: object) -> bool:
    """Return True for a Python number that may be bound late; ``True`` and NumPy's are none."""
    return type(value) in (int, float)


@dataclass(frozen=True, slots=True, eq=False)
class NumberSlot:
    """A place that holds a number.

    Attributes:
        name: what it is called in messages; unique among what a step reads.
        root: a module, a cell, a function's global variables, or the loss.
        path: the steps from there; the last one leads to the number.
    """

    name: str
    root: object
    path: tuple[Step, ...]

    def holder(self, root: object = None) -> Any:
        """Return the object that holds it.

        Args:
            root: to begin at instead, such as the copy of a module.

        Raises:
            AttributeError, IndexError, KeyError, TypeError: if it is no longer there.
        """
        present: Any = self.root if root is None else root
        for step in self.path[:-1]:
            present = follow(present, step)
        return present

    def read(self, root: object = None) -> Any:
        """Return what is there now; None if the place is gone. ``root`` is as of :meth:`holder`."""
        try:
            return follow(self.holder(root), self.path[-1])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None

    def write(self, value: object, root: object = None) -> None:
        """Put something in the number's place; ``root`` is as of :meth:`holder`."""
        holder, (kind, name) = self.holder(root), self.path[-1]
        if kind == "cell":
            holder.cell_contents = value
        elif kind == "field":
            object.__setattr__(holder, name, value)
        else:
            holder[name] = value

    def may_be_late(self, before: float) -> bool:
        """Return True if what is there now may be bound late, and is of the kind of an earlier number."""
        now = self.read()
        return type(now) is type(before) and can_be_late(now)

    def place(self) -> Place | None:
        """Return where it is now; None if that is gone."""
        try:
            return id(self.holder()), self.path[-1][1]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None


def follow(present: Any, step: Step) -> Any:
    """Go one step from an object to one that it holds."""
    kind, name = step
    if kind == "cell":
        return present.cell_contents
    return present[name] if kind == "item" else getattr(present, name)


@dataclass(frozen=True, slots=True)
class LateBinding:
    """The numbers that a plan reads at every call.

    Attributes:
        slots: their places, in the order of their placeholders.
        types: ``int`` or ``float`` of each.
        decisions: that the traced code took by them.
    """

    slots: tuple[NumberSlot, ...] = ()
    types: tuple[type, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def places(self) -> frozenset[Place]:
        """Return where the numbers are now; without those whose places are gone."""
        places = (slot.place() for slot in self.slots)
        return frozenset(place for place in places if place is not None)

    def gather(self) -> list[Any]:
        """Return the numbers."""
        return [slot.read() for slot in self.slots]

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield what is said if the numbers no longer suit the plan, and what tells."""
        numbers = self.gather()
        for slot, number in zip(self.slots, numbers, strict=True):
            yield f"{slot.name} is another kind of number", (type(number), can_be_late(number))
        names = ", ".join(slot.name for slot in self.slots)
        if self.decisions:
            yield f"another branch is taken by {names}", [took_other(numbers, it) for it in self.decisions]

    def suits(self, numbers: Sequence[Any]) -> bool:
        """Return True if the traced code would take the same decisions by other numbers."""
        kinds = zip(numbers, self.types, strict=True)
        return all(type(number) is kind and can_be_late(number) for number, kind in kinds) and not any(
            took_other(numbers, decision) for decision in self.decisions
        )


NO_NUMBERS = LateBinding()
"""Binds no number late."""


def can_be_late(number: object) -> bool:
    """Return True for a number with which a graph can compute: infinities change what is equal to what."""
    if type(number) is int:
        return abs(number) <= _LARGEST_INTEGER
    return type(number) is float and math.isfinite(number)


def took_other(numbers: Sequence[Any], decision: Decision) -> bool:
    """Return True if a decision differs for some numbers."""
    try:
        return bool(decision.question.evaluate(numbers)) is not decision.answer
    except (ArithmeticError, TypeError, ValueError):
        return True


class NumberFinder:
    """Takes snapshots in which numbers that may be bound late are left out, and lists those.

    Attributes:
        slots: for each place of a number, where it is kept and what it is.
        fields: what counts of objects.
    """

    def __init__(self, fields: FieldsRead) -> None:
        """Begin without any.

        Args:
            fields: what counts of objects.
        """
        self.slots: dict[Place, tuple[NumberSlot, Any]] = {}
        self.fields = fields
        self._known: dict[int, object] = {}

    def note(self, slot: NumberSlot, holder: object, number: object) -> str:
        """Note a number; return what stands for it in a snapshot."""
        self.slots.setdefault((id(holder), slot.path[-1][1]), (slot, number))
        return _NUMBER

    def snapshot(self, name: str, root: object, path: tuple[Step, ...], value: Any, depth: int = 0) -> object:
        """Take a snapshot of a value without its numbers.

        Args:
            name: of the value.
            root: where it was reached from.
            path: the steps to it.
            value: anything but a number.
            depth: at which it was reached.
        """
        is_near = depth < DEEPEST or type(value) in self.fields
        parts = steps_of(value, self.fields) if is_near else None
        if parts is None:
            return snapshot_of(value, depth=depth, fields=self.fields)
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = Same(value)  # if it is reached from itself
        depth, _ = one_step(value, depth, (), self.fields)
        described: list[tuple[Step, object]] = []
        for step, part in parts:
            named, there = f"{name}.{step[1]}".lstrip("."), (*path, step)
            if is_number(part) and step[0] in ("field", "item"):
                described.append((step, self.note(NumberSlot(named, root, there), value, part)))
            else:
                described.append((step, self.snapshot(named, root, there, part, depth)))
        self._known[id(value)] = type(value), described
        return self._known[id(value)]

    def facts(self, late: LateBinding) -> Iterator[tuple[str, object]]:
        """Yield what is said if a number that is not bound late has changed, and the number."""
        places = late.places()
        for place, (slot, number) in self.slots.items():
            if place not in places:
                yield changed(slot), (type(number), repr(number))


def changed(slot: NumberSlot) -> str:
    """Return what is said if a number has changed."""
    return f"{slot.name} changed"


def root_in(root: object, copies: Mapping[int, nn.Module], loss_fn: object, copied_loss: object) -> object:
    """Return what stands for a root of a number in a copy of model and loss."""
    if root is loss_fn and root is not None:
        return copied_loss
    return copies.get(id(root), root)


def cell_or_globals(holder: object, name: str) -> tuple[Step, ...]:
    """Return the step to a variable of a function; none to its defaults, whose tuples do not change."""
    if isinstance(holder, CellType):
        return (("cell", name),)
    return (("item", name),) if isinstance(holder, dict) else ()
