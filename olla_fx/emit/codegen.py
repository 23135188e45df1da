"""Generates one Python function from an emitted graph.

The code that fx writes looks every operator up by its path (``torch.ops.aten.mm.default``) and goes through
its Python wrapper at each call, which costs about as much as a small operator's own work. Here each operator
is looked up once. Graph modules are for printing, recording and reading; the function does not hold one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def generated_function(graph: fx.Graph, constants: nn.Module) -> Callable[..., Any]:
    """Generate a function that runs a graph, its operators looked up already.

    Args:
        graph: of a module from :func:`olla_fx.emit.graph.reordered_graphs`.
        constants: has the attributes that the graph reads.

    Returns:
        A function of the graph's placeholders.
    """
    operators: dict[str, object] = {}

    def look_up(match: re.Match[str]) -> str:
        namespace, name, overload = match.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        local = f"_{namespace}_{name}_{overload}"
        operators[local] = torch_compat.direct_call(operator)
        return local

    written = graph.python_code("self")
    code = _OPERATOR.sub(look_up, written.src)
    names: dict[str, Any] = {**written.globals, **operators}
    exec(compile(code, "<planned step>", "exec"), names)
    return MethodType(names["forward"], constants)


class _Attributes:
    """What generated code reads as attributes, with other numbers."""

    def __init__(self, constants: object, numbers: Mapping[str, Any]) -> None:
        self.__dict__.update(numbers)
        self._constants = constants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constants, name)


def with_attributes(function: Callable[..., Any], numbers: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a generated function that reads other numbers.

    Args:
        function: from :func:`generated_function`.
        numbers: by the attribute's name.
    """
    method: Any = function
    return MethodType(method.__func__, _Attributes(method.__self__, numbers))
