"""Finds what Python functions read beside their arguments: closures, defaults, global variables.

The border: values are followed that the loss and the modules' own code read from attributes of modules,
closures, defaults and global variables of the user's code, through functions that it calls, a few deep.
Not followed are installed packages (libraries keep caches in global variables), attributes of Python
modules (``settings.rate``), files and the environment.
"""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
import types
from collections.abc import Iterator

_DEEPEST_CALL = 4
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def function_behind(value: object) -> types.FunctionType | None:
    """Return the plain function of a method, property, class or static method; None of anything else."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def is_users(function: types.FunctionType) -> bool:
    """Return True for a function that belongs to no installed package."""
    path = function.__code__.co_filename
    installed = path.startswith(_STANDARD_LIBRARY) or any(folder in path for folder in _PACKAGES)
    return not installed and not _is_torchs(function)


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def followed_functions(root: object) -> list[types.FunctionType]:
    """Return a function and those of the user's that it reaches by closure, defaults or global variables.

    Args:
        root: anything; only plain functions that are not torch's have any.
    """
    followed: dict[types.FunctionType, None] = {}
    level = [root] if isinstance(root, types.FunctionType) and not _is_torchs(root) else []
    for _ in range(_DEEPEST_CALL):
        followed.update(dict.fromkeys(level))
        reached = [value for function in level for _, value in names_read(function)]
        level = [
            value
            for value in reached
            if isinstance(value, types.FunctionType) and value not in followed and is_users(value)
        ]
    return list(followed)


def function_values(root: object) -> dict[str, object]:
    """Return what a function and those that it reaches read beside their arguments, by name."""
    return {
        f"{function.__qualname__}[{index}].{name}" if index else name: value
        for index, function in enumerate(followed_functions(root))
        for name, value in names_read(function)
    }


def names_read(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield name and value of everything that one function reads beside its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield "(defaults)", (function.__defaults__, function.__kwdefaults__)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global variables that some code reads, in comprehensions and inner functions, too."""
    names = [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += global_names(constant)
    return tuple(dict.fromkeys(names))
