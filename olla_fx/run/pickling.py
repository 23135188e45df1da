"""Chooses what copies and pickles of planned modules take over: all but what they make for themselves."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from olla_fx.errors import NotPicklableError

_REMADE = frozenset(
    {"_model", "_modules", "_parameters", "_buffers", "training", "_request", "_example", "_answers"}
    | {"_lock", "_turn", "_plans", "_shown_forward"}
)
"""Attributes that a planned module's copies make for themselves."""


def carried(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of a planned module, and the attributes that its user gave it."""
    return {name: value for name, value in module.__dict__.items() if name not in _REMADE}


def refuse_unnamed(loss_fn: object) -> None:
    """Refuse a loss that pickle could not find again by its name.

    Raises:
        NotPicklableError: if it is such a one; names it.
    """
    if isinstance(loss_fn, types.FunctionType):
        named: object = sys.modules.get(loss_fn.__module__)
        for name in loss_fn.__qualname__.split("."):
            named = getattr(named, name, None)
        if named is not loss_fn:
            raise NotPicklableError(
                f"the loss function {loss_fn.__qualname__} cannot be pickled, for no module has it by this "
                "name: define it with def at the top of a module, or make it an nn.Module"
            )
