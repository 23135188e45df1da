"""What a forward writes on Python attributes when it runs for the first time, and never again.

A classifier of transformers notes in its configuration what kind of problem its labels make of it. A plan
is captured as if that had been written before; where it has not, the call that uses the plan writes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from olla_fx.guards.snapshot import DEEPEST, PLAIN, steps_of

ABSENT = object()
"""Stands for a value where there is none."""

Place = tuple[str, tuple[tuple[str, Any], ...]]
"""The name of a module, and the steps from it; the last one leads to a plain value."""


@dataclass(frozen=True, slots=True)
class FirstWrite:
    """One value that is written.

    Attributes:
        place: where; the steps are those of :func:`~olla_fx.guards.snapshot.steps_of`.
        before: what is there at first; :data:`ABSENT` if nothing is.
        after: what is there from then on.
    """

    place: Place
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class FirstWrites:
    """All values that are written."""

    writes: tuple[FirstWrite, ...] = ()

    def __bool__(self) -> bool:
        """Return True if there are any."""
        return bool(self.writes)

    def names(self) -> str:
        """Return the attributes' names for a message."""
        return ", ".join(
            repr(".".join([*filter(None, [write.place[0]]), *(str(name) for _, name in write.place[1])]))
            for write in self.writes
        )

    @property
    def places(self) -> frozenset[Place]:
        """Where it is written."""
        return frozenset(write.place for write in self.writes)

    def with_places(self, places: frozenset[Place], modules: Mapping[str, nn.Module]) -> FirstWrites:
        """Return these writes, and that what is at some other places now is left as it is.

        A forward that is captured when a place holds already what it writes there does not show that it does.

        Args:
            places: to which other forwards of the same modules write.
            modules: as of :meth:`are_pending`.
        """
        present = [(place, _read(modules, place)) for place in sorted(places - self.places, key=repr)]
        others = (FirstWrite(place, value, value) for place, value in present if value is not ABSENT)
        return FirstWrites((*self.writes, *others))

    def are_pending(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return True if nothing of it has been written.

        Args:
            modules: of the step, by name.
        """
        return bool(self.writes) and all(
            _is_same(_read(modules, write.place), write.before) for write in self.writes
        )

    def are_made(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return True if all of it is written; ``modules`` are as of :meth:`are_pending`."""
        return all(_is_same(_read(modules, write.place), write.after) for write in self.writes)

    def make(self, modules: Mapping[str, nn.Module]) -> None:
        """Write it; ``modules`` are as of :meth:`are_pending`."""
        for write in self.writes:
            _write(modules, write.place, write.after)

    def undo(self, modules: Mapping[str, nn.Module]) -> None:
        """Write what was there before; ``modules`` are as of :meth:`are_pending`."""
        for write in self.writes:
            _write(modules, write.place, write.before)

    @contextlib.contextmanager
    def assumed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Let it be written for a while, if it has not been; ``modules`` are as of :meth:`are_pending`."""
        if not self.are_pending(modules):
            yield
            return
        self.make(modules)
        try:
            yield
        finally:
            self.undo(modules)


NO_WRITES = FirstWrites()
"""Writes nothing."""


def plain_values(modules: Mapping[str, nn.Module], without: frozenset[str]) -> dict[Place, object]:
    """Return the plain values that modules hold in attributes, and in objects within reach of these.

    Args:
        modules: by name.
        without: names of attributes that are left out.
    """
    values: dict[Place, object] = {}
    seen: set[int] = set()
    for owner, module in modules.items():
        for key, value in module.__dict__.items():
            if key not in without:
                _note(values, seen, (owner, (("field", key),)), value)
    return values


def first_writes(before: Mapping[Place, object], after: Mapping[Place, object]) -> FirstWrites:
    """Return what was written between two looks at the same modules.

    Args:
        before: from :func:`plain_values`.
        after: later.
    """
    writes = (
        FirstWrite(place, before.get(place, ABSENT), value)
        for place, value in after.items()
        if not _is_same(before.get(place, ABSENT), value)
    )
    return FirstWrites(tuple(writes))


def _note(values: dict[Place, object], seen: set[int], place: Place, value: object) -> None:
    owner, path = place
    if isinstance(value, PLAIN):
        values[place] = value
        return
    if id(value) in seen or len(path) > DEEPEST:
        return
    seen.add(id(value))
    for step, part in steps_of(value) or ():
        # Only what has a name can be written again: a list may have grown.
        if step[0] != "attribute" and isinstance(step[1], str):
            _note(values, seen, (owner, (*path, step)), part)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and (one is other or repr(one) == repr(other))


def _holder(modules: Mapping[str, nn.Module], place: Place) -> Any:
    """Return the dictionary that holds a value.

    Raises:
        AttributeError, KeyError, TypeError: if it is no longer there.
    """
    owner, path = place
    present: Any = modules[owner]
    for kind, name in path[:-1]:
        present = present.__dict__[name] if kind == "field" else present[name]
    return present.__dict__ if path[-1][0] == "field" else present


def _read(modules: Mapping[str, nn.Module], place: Place) -> object:
    try:
        return _holder(modules, place)[place[1][-1][1]]
    except (AttributeError, KeyError, TypeError):
        return ABSENT


def _write(modules: Mapping[str, nn.Module], place: Place, value: object) -> None:
    holder, name = _holder(modules, place), place[1][-1][1]
    if value is ABSENT:
        del holder[name]
    else:
        holder[name] = value
