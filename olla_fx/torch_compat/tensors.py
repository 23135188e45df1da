"""Reads properties of tensors, operators and nested structures that PyTorch keeps private."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from olla_fx.torch_compat.operators import OpOverload

pytree = _pytree

TorchDispatchMode = _python_dispatch.TorchDispatchMode

_address_of = attrgetter("_cdata")

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns a number that grows with every write in place; raises RuntimeError for inference tensors."""


def flat(values: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Return what ``pytree.tree_flatten`` does; for tensors alone in the time of a small operator."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return list(values), _spec_of_leaves(len(values))
    return _pytree.tree_flatten(values)


@functools.cache
def _spec_of_leaves(count: int) -> Any:
    return _pytree.tree_structure((0,) * count)


def makes_plain_tensors(tensor: torch.Tensor) -> bool:
    """Return False for a tensor whose class has a say in what operators do with it and return."""
    kind = type(tensor)
    plain: Any = torch._C._disabled_torch_function_impl
    return kind is torch.Tensor or getattr(kind, "__torch_function__", plain) is plain


def states_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return :data:`version_of` and the address of each tensor."""
    return list(map(version_of, tensors)), list(map(torch.Tensor.data_ptr, tensors))


UNINITIALIZED = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
"""Types of lazy modules' parameters and buffers before their first call."""


def direct_call(operator: object) -> Callable[..., Any]:
    """Return what an operator's Python wrapper calls; other callables as they are."""
    if type(operator) is OpOverload:
        call: Callable[..., Any] = operator._op
        return call
    if not callable(operator):
        raise TypeError(f"{operator} cannot be called")
    return operator


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two live tensors share exactly if they share their storage."""
    return int(tensor.untyped_storage()._cdata)


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return :func:`storage_key` of each tensor."""
    return list(map(_address_of, map(torch.Tensor.untyped_storage, tensors)))


def in_different_storages(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if no two tensors share their storage."""
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    return len(set(map(id, storages))) == len(storages)  # a live storage is one Python object


def tensors_fit(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a test that as many tensors are of the same kinds, each as the one in its place.

    That is class, sizes, strides, dtype, device, requires_grad, and the bits for lazy conjugation and
    negation, as Dynamo's guards see them. The tensors are not kept alive.
    """
    sizes: list[Any] = [list(tensor.size()) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def tensor_dictionary() -> MutableMapping[torch.Tensor, Any]:
    """Return a dictionary with tensors as keys, by identity; it does not keep them alive."""
    dictionary: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
    return dictionary
