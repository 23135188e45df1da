"""Keeps eager's strides where an operator works in place on a tensor with gaps.

``gates.chunk(3, 1)[0].sigmoid_()`` leaves its result in the rows of ``gates``. Functionalisation makes
it ``sigmoid``, whose result is dense, and every later kernel then walks memory in another way: it takes
whole rows at once, in vectors, where eager's takes one row at a time and a scalar tail, which rounds
``exp`` differently. Such an operator is traced as its functional form and ``copy`` of the result into
the strides of its argument; :func:`olla_fx.rewrite.restore.restore_in_place` puts the two together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EagerLayouts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, in-place operators leave their argument's strides as they are."""

    def __init__(self) -> None:
        """Make the mode; it acts within a ``with`` block."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        functional = _functional_form(func) if func._schema.is_mutable else None
        if functional is None or _is_dense(args[0]):
            return func(*args, **kwargs)
        target = args[0]
        result = functional(*args, **kwargs)
        if result.shape != target.shape or result.dtype != target.dtype:
            return func(*args, **kwargs)
        return target.copy_(result)


def _functional_form(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional twin of an in-place operator; None without one, or when it draws random numbers."""
    name = operator._schema.name.removeprefix("aten::")
    if operator.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    if operator is torch.ops.aten.copy_.default or torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, operator._overloadname, None)
    if not isinstance(twin, torch._ops.OpOverload) or twin._schema.is_mutable:
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return twin if names == [argument.name for argument in twin._schema.arguments] else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills a piece of memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
