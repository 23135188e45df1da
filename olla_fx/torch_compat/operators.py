"""Reads schemas of operators, and marks on the nodes of graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

OpOverload = torch._ops.OpOverload

OPERATOR_TYPES = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
"""Types of what calls an operator; the objects keep caches, which fill up as they are used."""


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: its name, arguments, results, and what it writes to."""
    return operator._schema


def overload_name(operator: OpOverload) -> str:
    """Return the name that tells an operator from others of its packet, such as ``Tensor``."""
    return operator._overloadname


def dispatched_name(operator: OpOverload) -> tuple[str, str]:
    """Return the names by which the dispatcher knows an operator: with its namespace, and of the overload."""
    schema = operator._schema
    return schema.name, schema.overload_name


def plain_name(operator: Any) -> str:
    """Return an operator's or a function's name without namespace and overload, such as ``all``."""
    return str(getattr(operator, "_opname", None) or operator.__name__)


def is_erased(node: fx.Node) -> bool:
    """Return True if a node was erased from its graph."""
    return node._erased
