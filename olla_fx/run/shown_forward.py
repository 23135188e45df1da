"""Shows a planned module's ``forward`` with the signature of its model's.

Libraries ask for it: Trainer of transformers drops the columns of a data set that ``forward`` does not name.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

SHOWN = "_shown_forward"
"""The attribute under which a module keeps what :class:`ShownForward` found."""


class ShownForward:
    """A method that each object shows with a signature of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Decorate a method.

        Args:
            function: the method, which uses no closure.
        """
        self.__doc__ = function.__doc__
        self._function = function

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        """Return the method, bound to a module if it is looked up on one."""
        if module is None:
            return self._function
        # Dynamo, which follows this, knows no types.MethodType.
        method: Callable[..., Any] = module.__dict__.get(SHOWN, self._function).__get__(module)
        return method


def shown_as(function: Callable[..., Any], shown: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does the same, with another signature; without another frame in a call.

    Args:
        function: the method, which uses no closure.
        shown: a bound method or a function whose parameters are shown.
    """
    same = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    same.__kwdefaults__ = function.__kwdefaults__
    same.__doc__, same.__qualname__ = function.__doc__, function.__qualname__
    signature = inspect.signature(shown)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    same.__signature__ = signature.replace(parameters=[this, *signature.parameters.values()])  # type: ignore[attr-defined]
    return same
