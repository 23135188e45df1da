"""Generates one Python function from an emitted graph.

The code that fx writes looks every operator up by its path (``torch.ops.aten.mm.default``) and goes through
its Python wrapper at each call, which costs about as much as a small operator's own work. Here each operator
is looked up once. The graph module is still what is printed, recorded and read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import fx

from olla_fx import torch_compat

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def generated_function(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Generate a function that runs a graph module's code, its operators looked up already.

    Args:
        graph_module: from :func:`olla_fx.emit.graph.reordered_graphs`.

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

    code = _OPERATOR.sub(look_up, graph_module.code)
    names: dict[str, Any] = {**type(graph_module).forward.__globals__, **operators}
    exec(compile(code, "<planned step>", "exec"), names)
    return MethodType(names["forward"], graph_module)


class _Attributes:
    """A graph module as generated code sees it, with other numbers."""

    def __init__(self, graph_module: fx.GraphModule, numbers: Mapping[str, Any]) -> None:
        self.__dict__.update(numbers)
        self._graph_module = graph_module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph_module, name)


def with_attributes(
    function: Callable[..., Any], graph_module: fx.GraphModule, numbers: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a generated function that finds other numbers as attributes of its graph module.

    Args:
        function: from :func:`generated_function`.
        graph_module: what it was generated from.
        numbers: by the attribute's name.
    """
    code: Any = getattr(function, "__func__", function)
    return MethodType(code, _Attributes(graph_module, numbers))
