"""Generates one Python function from an emitted graph, for where there is no compiler.

Elsewhere a step runs as a native program (:mod:`olla_fx.emit.program`). The code that fx writes looks every
operator up by its path (``torch.ops.aten.mm.default``) and goes through its Python wrapper at each call,
which costs about as much as a small operator's own work. Here each operator is looked up once. Graph modules
are for printing, recording and reading; the function does not hold one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


class _Attributes:
    """What generated code reads as attributes, with other numbers."""

    def __init__(self, constants: object, numbers: Mapping[str, Any]) -> None:
        self.__dict__.update(numbers)
        self._constants = constants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constants, name)


class GeneratedFunction:
    """Runs a graph, its operators looked up already."""

    def __init__(self, code: Callable[..., Any], constants: object) -> None:
        """Hold generated code; see :func:`generated_function`.

        Args:
            code: a function of the constants and the graph's placeholders.
            constants: has the attributes that the graph reads.
        """
        self._code = code
        self._constants = constants

    def with_attributes(self, numbers: Mapping[str, Any]) -> GeneratedFunction:
        """Return the same code with other numbers.

        Args:
            numbers: by the attribute's name.
        """
        return GeneratedFunction(self._code, _Attributes(self._constants, numbers))

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph with the values of its placeholders."""
        with torch.no_grad():
            return self._code(self._constants, *arguments)


def generated_function(graph: fx.Graph, constants: nn.Module) -> GeneratedFunction:
    """Generate a function that runs a graph.

    Args:
        graph: of a module from :func:`olla_fx.emit.graph.reordered_graphs`.
        constants: has the attributes that the graph reads.
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
    return GeneratedFunction(names["forward"], constants)
