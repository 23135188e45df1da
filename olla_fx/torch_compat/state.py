"""Reads and sets the thread's state: modes, autograd's engine, autocast, settings that choose kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.backends import opt_einsum
from torch.utils import _python_dispatch
from torch.utils import checkpoint as _checkpoint

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_ORDERS_EINSUMS = opt_einsum.is_available()
_CPU = torch.device("cpu")


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Make operators skip autograd, although gradients may be enabled."""
    guard: contextlib.AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Let operators compute on real tensors, whatever modes are on."""
    with _python_dispatch._disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def on_real_tensors(function: Callable[[_Value], _Result], value: _Value) -> _Result:
    """Call a function as within :func:`real_tensors`, quickly where no mode is on."""
    if torch._C._len_torch_dispatch_stack():
        with real_tensors():
            return function(value)
    with below_autograd(), torch._C._DisableAutocast():
        return function(value)


def real_random_number() -> int:
    """Draw a number from the real default generator, beneath all modes of tracing."""
    with real_tensors():
        return int(torch.randint(1 << 62, ()))


def is_observed() -> bool:
    """Return True if a dispatch mode is on: fake tensors, tracing, or a counter of the caller's."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_traced_by_torchscript() -> bool:
    """Return True if ``torch.jit.trace`` records what this thread calls."""
    return torch._C._is_tracing()


def is_transformed() -> bool:
    """Return True if ``torch.func`` (``vmap``, ``grad``) or forward-mode differentiation is on."""
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return in_transform or forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Return True if a tensor stands for several (``torch.autograd.grad(..., is_grads_batched=True)``)."""
    functorch = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor))


def is_recomputing() -> bool:
    """Return True if a checkpoint runs its function a second time, to get back what it did not save."""
    with without_saved_tensor_hooks() as hooks:
        prefix = f"{_checkpoint._recomputation_hook.__qualname__}."
        return any(unpack.__qualname__.startswith(prefix) for _, unpack in hooks)


def backward_number() -> int:
    """Return a number that no other backward has; -1 if none is running on this thread."""
    return int(torch._C._current_graph_task_id())


def graph_is_kept() -> bool:
    """Return True if the caller of the running backward passed ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply a function of autograd's outside of ``torch.func``, for which its Python wrapper would ask."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def saves_tensors_through_hooks() -> bool:
    """Return True if hooks get what operators save for backward, as by ``checkpoint``, ``save_on_cpu``."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[list[tuple[Any, Any]]]:
    """Switch the caller's saved-tensor hooks off; yields them, the innermost first."""
    autograd: Any = torch._C._autograd
    hooks: list[tuple[Any, Any]] = []
    while (hook := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(hook)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def saved_tensor_hooks_in_traces() -> Iterator[None]:
    """Let saved-tensor hooks, by which checkpointing works, act while tracing."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype, bool]:
    """Return a device's autocast: True if it is on, its dtype, and True if it keeps what it casts."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled, torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()


def tracing_settings() -> tuple[object, ...]:
    """Return the settings that a graph bakes: the type and device of new tensors, the order of an einsum."""
    # Asking for the device takes microseconds, and only a function mode can have set one.
    modes = torch._C._len_torch_function_stack()
    settings: tuple[object, ...] = (
        torch.get_default_dtype(),
        torch.get_default_device() if modes else _CPU,
    )
    return (*settings, opt_einsum.enabled, opt_einsum.strategy) if _ORDERS_EINSUMS else settings


def kernel_settings() -> tuple[object, ...]:
    """Return the settings that decide which kernels run and which memory they request."""
    settings = (
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.are_deterministic_algorithms_enabled(),
    )
    return settings if torch.version.cuda is None else settings + _cuda_kernel_settings()


def _cuda_kernel_settings() -> tuple[object, ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        tuple(torch._C._get_sdp_priority_order()),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
