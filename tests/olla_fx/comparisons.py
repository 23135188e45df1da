"""Compares tensors, models and optimizers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as pytree


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements: -0.0 is not +0.0, and NaN is itself."""
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors have the same type, shape and bytes."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_same(expected: object, given: object, what: str) -> None:
    """Compare two structures of tensors and numbers, bit for bit."""
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    given_leaves, given_spec = pytree.tree_flatten(given)
    assert expected_spec == given_spec, what
    for left, right in zip(expected_leaves, given_leaves, strict=True):
        if isinstance(left, torch.Tensor):
            assert same_bits(left, right), f"{what}: {left} is not {right}"
        else:
            assert left == right, what


def assert_close(expected: torch.Tensor, given: torch.Tensor, what: str) -> None:
    """Compare two tensors up to the order of a sum."""
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-5, msg=lambda text: f"{what}: {text}")


def assert_same_models(eager: nn.Module, planned: nn.Module) -> None:
    """Compare parameters and buffers, bit for bit."""
    for left, right in (
        (dict(eager.named_parameters()), dict(planned.named_parameters())),
        (dict(eager.named_buffers()), dict(planned.named_buffers())),
    ):
        assert left.keys() == right.keys()
        for name in left:
            assert_same(left[name], right[name], name)


def assert_same_gradients(
    eager: nn.Module, planned: nn.Module, compare: Callable[..., None] = assert_same
) -> None:
    """Compare the gradients of all parameters, bit for bit unless told otherwise."""
    for (name, left), right in zip(eager.named_parameters(), planned.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None), name
        if left.grad is not None:
            compare(left.grad, right.grad, f"gradient of {name}")


def assert_same_optimizers(eager: torch.optim.Optimizer, planned: torch.optim.Optimizer) -> None:
    """Compare the state of every parameter, bit for bit."""
    for eager_group, planned_group in zip(eager.param_groups, planned.param_groups, strict=True):
        pairs = zip(eager_group["params"], planned_group["params"], strict=True)
        for index, (left, right) in enumerate(pairs):
            expected, given = (
                {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
                for optimizer, parameter in ((eager, left), (planned, right))
            )
            assert_same(expected, given, f"state of parameter {index}")


def random_states() -> list[torch.Tensor]:
    """Return the state of the generators of all devices that are in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
