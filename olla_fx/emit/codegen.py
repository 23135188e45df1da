"""Generates one Python function from an emitted graph.

The code that fx writes looks every operator up by its path (``torch.ops.aten.mm.default``) and goes through
its Python wrapper at each call, which costs about as much as a small operator's own work. Here each operator
is looked up once. The graph module is still what is printed, recorded and read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
