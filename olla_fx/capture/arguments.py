"""Brings the inputs of a call into one form, however they were given.

A model is called with inputs in sequence and by name. What its forward takes in sequence is put in its place
there, so that both ways of calling are one kind; the rest follows as one dictionary, :class:`NamedInputs`.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from olla_fx.errors import StepInputError
from olla_fx.torch_compat import pytree


class NamedInputs(dict[str, Any]):
    """The inputs that a model takes by name only; the last one of its inputs if there are any."""


def _flatten_named(named: NamedInputs) -> tuple[list[Any], list[str]]:
    return list(named.values()), list(named)


def _unflatten_named(values: Iterable[Any], names: Sequence[str]) -> NamedInputs:
    return NamedInputs(zip(names, values, strict=True))


pytree.register_pytree_node(NamedInputs, _flatten_named, _unflatten_named)


def call_with(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a model.

    Args:
        function: the model.
        inputs: those in sequence, and :class:`NamedInputs` at the end if there are any.
    """
    if inputs and type(inputs[-1]) is NamedInputs:
        return function(*inputs[:-1], **inputs[-1])
    return function(*inputs)


def in_sequence(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return inputs in the places where the model's forward takes them, those that have none at the end.

    Args:
        model: the user's.
        inputs: those given in sequence.
        named: those given by name.

    Raises:
        StepInputError: if the model does not take them so.
    """
    arrangement = _arrangement(model, len(inputs), tuple(named))
    values = [*inputs, *named.values()]
    sequence = tuple(values[part] if is_given else part for is_given, part in arrangement.sequence)
    if not arrangement.by_name:
        return sequence
    return (*sequence, NamedInputs((name, values[index]) for name, index in arrangement.by_name))


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """The places of inputs that are given in one way.

    Attributes:
        sequence: for each place, True and the index of an input, or False and forward's default.
        by_name: the names that have no place, each with the index of an input.
    """

    sequence: tuple[tuple[bool, Any], ...]
    by_name: tuple[tuple[str, int], ...]


_arrangements: weakref.WeakKeyDictionary[Any, dict[tuple[bool, int, tuple[str, ...]], _Arrangement]] = (
    weakref.WeakKeyDictionary()
)
"""By the function behind a forward: reading a signature takes longer than all that a call does else."""


def _arrangement(model: nn.Module, count: int, names: tuple[str, ...]) -> _Arrangement:
    forward: Any = model.forward
    is_method = isinstance(forward, types.MethodType)
    known = _arrangements.setdefault(forward.__func__ if is_method else forward, {})
    key = is_method, count, names
    if key not in known:
        try:
            known[key] = _arrange(inspect.signature(forward), count, names)
        except TypeError as error:
            raise StepInputError(f"{type(model).__name__}.forward: {error}") from error
    return known[key]


def _arrange(signature: inspect.Signature, count: int, names: tuple[str, ...]) -> _Arrangement:
    """Find the places of ``count`` inputs in sequence and some by name; their indices are bound for them.

    Raises:
        TypeError: if the signature does not allow them.
    """
    bound = signature.bind(*range(count), **{name: count + index for index, name in enumerate(names)})
    given = set(bound.arguments)
    bound.apply_defaults()
    placed = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    last = max((index for index, name in enumerate(placed) if name in given), default=-1)
    sequence = [(name in given, bound.arguments[name]) for name in [*placed][: last + 1]]
    sequence += [(True, index) for index in range(len(sequence), count)]
    by_name = [
        (name, count + index)
        for index, name in enumerate(names)
        if name not in placed or placed[name].kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    return _Arrangement(tuple(sequence), tuple(sorted(by_name)))


def takes_by_name(model: nn.Module, named: Mapping[Any, Any]) -> bool:
    """Return True if a dictionary is one of inputs by name, not an input: forward takes at least one so.

    Args:
        model: the user's.
        named: an example.
    """
    parameters = inspect.signature(model.forward).parameters
    if not all(isinstance(name, str) for name in named) or parameters.keys().isdisjoint(named):
        return False
    try:
        in_sequence(model, (), named)
    except StepInputError:
        return False
    return True
