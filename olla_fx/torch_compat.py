"""The one door to PyTorch's private interfaces.

Everything that PyTorch does not promise to keep is used here and nowhere else, so that a new release
needs one file read. Tested with the releases between ``OLDEST_TESTED`` and ``NEWEST_TESTED``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import aot_autograd as _aot_autograd
from torch._functorch._aot_autograd import graph_compile as _graph_compile
from torch._subclasses import fake_tensor as _fake_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.nn.modules import activation as _activation
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakTensorKeyDictionary

OLDEST_TESTED = (2, 11)
NEWEST_TESTED = (2, 13)

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    _symbolic_shapes.GuardOnDataDependentSymNode,
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
)
"""What fake tensors raise when Python asks for a value that only real data could give."""

pytree = _pytree
OpOverload = torch._ops.OpOverload
TorchDispatchMode = _python_dispatch.TorchDispatchMode

UNINITIALIZED = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
"""What lazy modules hold before their first call."""

_GLOBAL_HOOKS = (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
)
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_patching = threading.RLock()
_TENSORIFY = "tensorify_python_scalars"


def warn_if_newer_than_tested() -> None:
    """Warn once when this torch is newer than the newest that the tests ran with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"olla_fx is tested with torch up to {newest}, this is {torch.__version__}: "
            "please report what breaks",
            RuntimeWarning,
            stacklevel=3,
        )


def new_fake_mode() -> Any:
    """A ``FakeTensorMode`` in which ``.item()`` gives a symbolic number instead of an error."""
    return _fake_tensor.FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=_symbolic_shapes.ShapeEnv(allow_scalar_outputs=True)
    )


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Within it, operators skip autograd, although gradients may be enabled."""
    guard: contextlib.AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within it, operators compute on real tensors, whatever modes are on."""
    with _python_dispatch._disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def tensor_dictionary() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary whose keys are tensors, by identity; it does not keep them alive."""
    dictionary: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
    return dictionary


@contextlib.contextmanager
def _fused_inference_layers() -> Iterator[None]:
    """Let transformer layers take their fused path while tracing, as they do in eager inference.

    They leave it when they see a tracer: by its dispatch mode, or by its function mode, which makes
    ``torch.overrides.has_torch_function`` true of plain tensors.
    """
    with _patching:
        saved = torch.overrides.has_torch_function, _activation._is_make_fx_tracing
        torch.overrides.has_torch_function = _any_overrides  # type: ignore[assignment]
        _activation._is_make_fx_tracing = lambda: False
        try:
            yield
        finally:
            torch.overrides.has_torch_function, _activation._is_make_fx_tracing = saved


def _any_overrides(arguments: Sequence[object]) -> bool:
    """Whether a tensor's class has a ``__torch_function__`` of its own."""
    inherited: Any = torch.Tensor.__torch_function__
    plain = (inherited.__func__, torch._C._disabled_torch_function_impl)
    methods = (getattr(type(each), "__torch_function__", None) for each in arguments)
    return any(method is not None and getattr(method, "__func__", method) not in plain for method in methods)


@contextlib.contextmanager
def _scalars_left_as_python_numbers() -> Iterator[None]:
    """Keep AOTAutograd from turning Python float arithmetic into tensor arithmetic.

    ``tensorify_python_scalars`` rewrites ``x * lr`` into operators on 0-dim float64 tensors rounded to
    float32 on the way, which is not what eager computes.
    """
    with _patching:
        original = getattr(_graph_compile, _TENSORIFY)
        setattr(_graph_compile, _TENSORIFY, lambda *_: None)
        try:
            yield
        finally:
            setattr(_graph_compile, _TENSORIFY, original)


# Python kernels that tracing needs: functionalisation cannot see the running statistics that the C++
# batch norms write, and the other C++ forms ask for values of their data.
_NEEDED_PYTHON_KERNELS = frozenset(
    {
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::one_hot",
        "aten::tensor_split",
        "aten::unsafe_chunk",
        "aten::broadcast_tensors",
        "aten::empty",
    }
)
_COMPOSITE_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@contextlib.contextmanager
def _composite_operators_as_in_eager() -> Iterator[None]:
    """Decompose composite operators by their C++ code, as eager runs them.

    torch registers Python forms of LSTM, interpolation, dropout and others for tracing, which compute in
    another order, or draw other random numbers. Dropout gets a form of its own, :func:`_dropout`.
    """
    with _patching:
        removed: list[tuple[Any, Any, Any]] = []
        for operator in _operators_with_python_kernels():
            for key in _COMPOSITE_KEYS:
                if key in operator.py_kernels:
                    removed.append((operator, key, operator.py_kernels.pop(key)))
                    operator._dispatch_cache.clear()
        dropout: Any = torch.ops.aten.dropout.default
        for key in _COMPOSITE_KEYS:
            dropout.py_kernels[key] = _dropout
        try:
            yield
        finally:
            for key in _COMPOSITE_KEYS:
                del dropout.py_kernels[key]
            dropout._dispatch_cache.clear()
            for operator, key, kernel in removed:
                operator.py_kernels[key] = kernel
                operator._dispatch_cache.clear()


def _operators_with_python_kernels() -> list[Any]:
    packets = [
        each for each in vars(torch.ops.aten).values() if isinstance(each, torch._ops.OpOverloadPacket)
    ]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return [
        operator
        for operator in operators
        if operator.py_kernels and operator._schema.name not in _NEEDED_PYTHON_KERNELS
    ]


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout with eager's results, and a mask of bytes where that gives the same bits.

    Eager multiplies by a mask of the input's own type, divided by ``1 - p``. ``native_dropout`` keeps one
    byte an element and multiplies by ``1 / (1 - p)``: forward and backward equal eager's for float32 and
    float64 where both round to the same number, but not for shorter types, whose scaled mask rounds.
    """
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    if tensor.dtype in (torch.float32, torch.float64) and p < 1 and _scales_are_equal(p, tensor.dtype):
        dropped: torch.Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
        return dropped
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _scales_are_equal(p: float, dtype: torch.dtype) -> bool:
    with real_tensors():
        one = torch.ones((), dtype=dtype)
        return bool(one.div(1 - p) == one.mul(1 / (1 - p)))


def kernel_settings() -> tuple[object, ...]:
    """What decides which CPU kernels run and which memory they request, beside their inputs."""
    return torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on for a device's type, to which dtype, and whether it keeps what it casts."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled, torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()


def trace_functional(
    function: Callable[..., Any], arguments: Sequence[Any], fake_mode: Any
) -> fx.GraphModule:
    """Trace ``function(*arguments)`` into one functional ATen graph, nothing being computed.

    AOTAutograd functionalises the function and appends one ``copy_`` for every mutated argument
    (``keep_inference_input_mutations``). It is compiled as an inference graph: differentiation happens
    inside the function.

    Args:
        function: takes and returns pytrees of tensors.
        arguments: pytrees of fake tensors of ``fake_mode``; no tensor occurs twice.
        fake_mode: from :func:`new_fake_mode`.

    Returns:
        The graph, with one placeholder for every tensor of ``arguments`` in flattening order.
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    traced = _aot_autograd.aot_function(
        function,
        fw_compiler=keep,
        inference_compiler=keep,
        keep_inference_input_mutations=True,
    )
    with (
        torch.no_grad(),
        fake_mode,
        _scalars_left_as_python_numbers(),
        _composite_operators_as_in_eager(),
        _fused_inference_layers(),
    ):
        traced(*arguments)
    return graphs[0]


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging a traceback for an error that is raised and explained anyway."""

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log = logging.getLogger(_fake_tensor.__name__)
    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


def assume_sign(number: Any, *, positive: bool) -> None:
    """Let a symbolic number answer comparisons with 0; a concrete one is left alone."""
    torch._check(number > 0 if positive else number < 0)  # type: ignore[no-untyped-call]


def optimizer_step_function(optimizer_type: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``step`` of an optimizer class without profiler, hook and scheduler wrappers."""
    step: Callable[..., Any] = inspect.unwrap(optimizer_type.step)
    return step


def initialize_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Create the state of a group's parameters as ``optimizer.step`` itself would.

    Every optimizer of ``torch.optim`` fills lists that its step works on in ``_init_group`` and creates
    missing state on the way; the lists are thrown away here.
    """
    init_group: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(init_group).parameters) - 1)]
    init_group(group, *lists)


def has_optimizer_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks would run before ``optimizer.step`` reads the gradients."""
    return bool(optimizer._optimizer_step_pre_hooks) or bool(_global_optimizer_pre_hooks)


def run_optimizer_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that ``optimizer.step`` runs last."""
    hooks = (
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    )
    for hook in hooks:
        hook(optimizer, (), {})


def note_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, as its wrapped ``step`` would."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether gradient hooks hang on a tensor."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def module_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """All forward and backward hooks that run for one module, global ones included."""
    tables = (*_GLOBAL_HOOKS, *map(module.__dict__.__getitem__, _HOOK_TABLES))
    if not any(tables):
        return []
    return [hook for table in tables for hook in table.values()]


def run_unplanned(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs a graph of Dynamo's as AOTAutograd does, without a plan of ours.

    Not the graph itself: checkpoints in it would recompute with other random numbers than they drew.
    """
    from torch._dynamo.backends import debugging

    compiled: Callable[..., Any] = debugging.aot_eager(graph_module, list(inputs))
    return compiled


@contextlib.contextmanager
def attribute_reads() -> Iterator[dict[tuple[int, str], torch.nn.Module]]:
    """Note which attributes this thread reads from modules.

    Yields:
        The module of each read by its identity and the attribute's name; filled as the code runs.
    """
    reads: dict[tuple[int, str], torch.nn.Module] = {}
    thread = threading.get_ident()

    def read(module: torch.nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            reads[id(module), name] = module
        return beneath(module, name)

    with _patching:
        # A planned module within a model that is being captured plans for itself meanwhile.
        outer = torch.nn.Module.__dict__.get("__getattribute__")
        beneath = outer or object.__getattribute__
        setattr(torch.nn.Module, "__getattribute__", read)  # noqa: B010
        try:
            yield reads
        finally:
            if outer is None:
                delattr(torch.nn.Module, "__getattribute__")
            else:
                setattr(torch.nn.Module, "__getattribute__", outer)  # noqa: B010


def is_observed() -> bool:
    """Whether a dispatch mode watches this thread: fake tensors, tracing, or a counter of the caller's."""
    return bool(torch._C._len_torch_dispatch_stack())


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def graph_is_kept() -> bool:
    """Within a backward: whether the caller passed ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def saved_tensor_hooks_in_traces() -> Iterator[None]:
    """Let saved-tensor hooks, by which checkpointing works, act while tracing."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def real_random_number() -> int:
    """A number from the real default generator, which it advances, drawn beneath all modes of tracing."""
    with real_tensors():
        return int(torch.randint(1 << 62, ()))


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two live tensors share exactly if they share their storage."""
    return int(tensor.untyped_storage()._cdata)
