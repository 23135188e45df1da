"""Notes what traced code reads from plain Python objects, and copies these objects as far as it is read.

A loss is often a method of an object that also holds the optimizer, the data, a history that grows and the
planned step itself. The traced code gets an empty object of the same class instead: a field is copied when
it is first read. The names that are read from objects of a class are what a plan depends on
(:data:`olla_fx.guards.snapshot.FieldsRead`).

A class tells what is read if it is of Python and looks attributes up as ``object`` does. While the code
runs, its methods for reading and writing attributes are replaced. Objects of all other classes are copied
and guarded as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.errors import CaptureError
from olla_fx.guards.reads import function_behind
from olla_fx.guards.snapshot import (
    CONTAINERS,
    DEEPEST,
    EVERY_FIELD,
    NOTHING,
    PLAIN,
    FieldsRead,
    parts_of,
    snapshot_of,
    stored,
)

_ALL_FIELDS = ("__dict__", "__reduce__", "__reduce_ex__", "__getstate__")
"""What is asked of an object by code that looks at all of its fields, as copying does."""

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
_NOT_HEARD: tuple[Any, ...] = (*PLAIN, *CONTAINERS, Mapping, enum.Enum, torch.Tensor, nn.Module, type)
_OWN_WAYS = ("__getattribute__", "__deepcopy__", "__reduce__", "__copy__", "__del__")
"""Methods of a class whose instances cannot be read, copied or dropped field by field."""

_FARTHEST = DEEPEST + 2
"""How far from the loss and the modules classes are looked for; snapshots without names end before."""


class ObjectReads:
    """What is read from plain Python objects, and the copies that are filled by it.

    Attributes:
        opaque: counts nothing of the objects that tell what is read of them.
        functions: that were read from fields.
    """

    def __init__(self, *roots: object) -> None:
        """Find the classes that tell what is read.

        Args:
            roots: from which the traced code gets at objects.
        """
        self._names: dict[type, set[str]] = {}
        self._memo: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        self._known: dict[int, object] = {}
        self._before: dict[tuple[int, str], tuple[Any, object]] = {}
        self._read_whole: set[type] = set()
        self._is_looking = False
        seen: dict[int, object] = {}
        for root in roots:
            self._find_classes(root, 0, seen)
        self.opaque: FieldsRead = dict.fromkeys(self._names, ())
        self.functions: list[types.FunctionType] = []

    def _find_classes(self, value: object, depth: int, seen: dict[int, object]) -> None:
        if depth > _FARTHEST or id(value) in seen or isinstance(value, PLAIN):
            return
        seen[id(value)] = value
        if _tells_reads(type(value)):
            self._names.setdefault(type(value), set())
        for _, part in parts_of(value) or ():
            self._find_classes(part, depth + 1, seen)

    def know(self, value: object) -> None:
        """Notice from now on if fields of the objects in a value change, until these are replaced."""
        for part in self._objects_in(value):
            self._known[id(part)] = part

    def copied(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return a copy of a value, in which objects are empty until something is read of them.

        Args:
            value: anything.
            memo: of :func:`copy.deepcopy`, which has copies already; it is kept.
        """
        self._memo = memo
        with self.unheard():
            for part in self._objects_in(value, stops_at=memo):
                shell = memo[id(part)] = object.__new__(type(part))
                self._originals[id(shell)] = part
                self._known[id(shell)] = shell
            return copy.deepcopy(value, memo)

    def _objects_in(
        self, value: object, depth: int = 0, stops_at: dict[int, Any] | None = None
    ) -> Iterator[Any]:
        """Yield the objects by which a value is the first to tell what is read of them."""
        if isinstance(value, torch.Tensor) and stops_at is not None:
            stops_at.setdefault(id(value), value)  # is not copied
        if depth > _FARTHEST or isinstance(value, PLAIN) or id(value) in (stops_at or ()):
            return
        if type(value) in self._names:
            yield value
            return
        for _, part in parts_of(value) or ():
            yield from self._objects_in(part, depth + 1, stops_at)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Note what this thread reads and writes, and fill copies; within this alone they can be used."""
        with torch_compat.attributes_heard(self._names, self._note_read, self._note_write):
            yield

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Note nothing for a while."""
        before, self._is_looking = self._is_looking, True
        try:
            yield
        finally:
            self._is_looking = before

    def fields(self) -> FieldsRead:
        """Return what was read, by class."""
        heard = {kind: tuple(sorted(names)) for kind, names in self._names.items()}
        return {kind: names for kind, names in heard.items() if kind not in self._read_whole} or EVERY_FIELD

    def changes(self) -> tuple[dict[str, list[object]], dict[str, list[object]]]:
        """Return snapshots of what was read or written, as it was before the first time and as it is now."""
        before: dict[str, list[object]] = {}
        now: dict[str, list[object]] = {}
        for (_, name), (value, snapshot) in self._before.items():
            named = f"{type(value).__name__}.{name}"
            before.setdefault(named, []).append(snapshot)
            now.setdefault(named, []).append(self._snapshot(stored(value, name)))
        return before, now

    def _snapshot(self, value: object) -> object:
        return snapshot_of(value, versions=True, fields=self.opaque)

    def _note_read(self, value: Any, name: str) -> None:
        is_of_class = name.startswith("__") and name.endswith("__")
        if self._is_looking or (is_of_class and name not in _ALL_FIELDS):
            return
        kind = type(value)
        if name in _ALL_FIELDS:
            self._read_whole.add(kind)
        elif kind in self._names:
            self._names[kind].add(name)
        self._note_first(value, name)

    def _note_write(self, value: Any, name: str) -> None:
        if not self._is_looking:
            self._note_first(value, name)

    def _note_first(self, value: Any, name: str) -> None:
        if id(value) not in self._known or (id(value), name) in self._before:
            return
        with self.unheard():
            original = self._originals.get(id(value), value)
            if name not in _ALL_FIELDS:
                self._fill(value, original, name)
                return
            for key, part in parts_of(original) or ():
                if (id(value), key) not in self._before:
                    with contextlib.suppress(CaptureError):  # it may be none that the code is after
                        self._fill(value, original, key)
                        continue
                    object.__setattr__(value, key, part)

    def _fill(self, value: Any, original: Any, name: str) -> None:
        """Note what an object keeps under a name; copy that if the object is a copy.

        Raises:
            CaptureError: if that cannot be copied.
        """
        part = stored(original, name)
        if part is not NOTHING and value is not original:
            try:
                part = self.copied(part, self._memo)
            except Exception as error:
                raise CaptureError(
                    f"the attribute {name!r} of {type(value).__name__}, which the loss reads, cannot be "
                    f"copied for capturing ({error}): keep what cannot be copied where the loss reads nothing"
                ) from error
            object.__setattr__(value, name, part)
        self.know(part)
        function = function_behind(part)
        self.functions += [] if function is None else [function]
        self._before[id(value), name] = value, self._snapshot(part)


def _tells_reads(kind: type) -> bool:
    """Return True for a class of Python, whose instances can be made empty and hide nothing from it."""
    own = kind.__mro__[:-1]
    if issubclass(kind, (*_NOT_HEARD, types.MethodType)) or not own:
        return False
    meta: Any = type(kind)
    if meta.__setattr__ is not type.__setattr__ or meta.__delattr__ is not type.__delattr__:
        return False
    if not all(base.__flags__ & _HEAP_TYPE and not base.__flags__ & _IMMUTABLE_TYPE for base in own):
        return False
    if any(name in base.__dict__ for base in own for name in _OWN_WAYS):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True
