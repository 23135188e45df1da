"""Traces a function once into one functional graph, as eager would compute it.

The parts are AOTAutograd's, put together for what a step needs. ``aot_function`` itself runs the function
beforehand to learn about its outputs and mutations, and runs the graph afterwards, which takes as long again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch import python as _python_dispatch
from torch._functorch._aot_autograd import functional_utils as _functional
from torch._higher_order_ops import wrap as _wrap
from torch._subclasses import functional_tensor as _functional_tensor
from torch.fx import _lazy_graph_module
from torch.fx import config as _config
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.nn.modules import activation as _activation
from torch.utils import checkpoint as _checkpoint

from olla_fx.torch_compat.patches import PATCHING
from olla_fx.torch_compat.tensors import storage_key
from olla_fx.torch_compat.tracing.composite import composite_operators_as_in_eager
from olla_fx.torch_compat.tracing.convolutions import convolutions_of_any_batch

_NO_STACK_TRACES = "do_not_emit_stack_traces"


def trace_functional(
    function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.Tensor], fake_mode: Any
) -> fx.GraphModule:
    """Trace ``function(*arguments)`` into one functional ATen graph, nothing being computed.

    Every argument that the function writes to has a ``copy_`` of its new value at the end of the graph.
    Differentiation happens inside the function.

    Args:
        function: takes and returns tensors; what it returns shares no storage with its arguments.
        arguments: fake tensors of ``fake_mode``; no tensor occurs twice.
        fake_mode: from :func:`new_fake_mode`.

    Returns:
        The graph, with one placeholder for every argument, and more for operators with side effects.

    Raises:
        AssertionError: if the function writes to a tensor that is no argument.
    """

    def functional(*values: torch.Tensor) -> tuple[Any, ...]:
        with _proxy_tensor.maybe_enable_thunkify():
            # Functionalisation in Python and the one in C++ exclude each other.
            with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
                wrapped = [_functional.to_fun(value) for value in values]
                results = function(*wrapped)
            for value, wrapper in zip(values, wrapped, strict=True):
                if _functional.has_data_mutation(wrapper):
                    value.copy_(_functional.from_fun(wrapper))  # type: ignore[arg-type]
            return tuple(_functional.from_fun(result) for result in results)

    # Numbers that an earlier trace read from the same arguments are not this graph's.
    fake_mode.epoch += 1
    with (
        torch.no_grad(),
        fake_mode,
        torch.autograd.set_multithreading_enabled(False),
        _python_dispatch.enable_python_dispatcher(),
        _without_stack_traces(),
        _lazy_graph_module._use_lazy_graph_module(True),
        composite_operators_as_in_eager(),
        convolutions_of_any_batch(),
        _fused_inference_layers(),
        _checkpoints_as_in_eager(),
        _functional_tensor.FunctionalTensorMode(_allow_token_discovery=True),
    ):
        trace = _proxy_tensor.make_fx(
            functional, decomposition_table={}, _disable_torch_fn_metadata_mode=True
        )
        graph_module: fx.GraphModule = trace(*arguments)
    _functional.assert_functional_graph(graph_module.graph)
    if graph_module.graph.eliminate_dead_code():
        graph_module.recompile()
    return graph_module


def layout_in_trace(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a function that :func:`trace_functional` traces may change of a tensor beside its values.

    Its size, strides and offset, by ``t_`` or ``resize_``, and its storage, by ``set_`` or ``tensor.data =``:
    functionalisation computes with the new ones and leaves the tensor outside as it was.
    """
    elem = tensor.elem if isinstance(tensor, _functional_tensor.FunctionalTensor) else tensor
    has_new_storage = elem is not tensor and torch._functionalize_was_storage_changed(elem)
    return (tensor.size(), tensor.stride(), tensor.storage_offset(), storage_key(tensor), has_new_storage)


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def lazy_graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """Return a graph module whose code is written when it is first called or printed.

    ``fx`` writes and compiles the code of every graph module, and keeps the text for good.

    Args:
        root: has the attributes that the graph reads.
        graph: of the module.
        name: of its class.
    """
    return _lazy_graph_module._LazyGraphModule(root, graph, name)


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Keep the tracer from noting for each node the lines of code that led to it.

    Nothing here reads them, and Python keeps every file that it looks a line up in. A release that has no
    such setting notes them.
    """
    with PATCHING:
        original = getattr(_config, _NO_STACK_TRACES, None)
        setattr(_config, _NO_STACK_TRACES, True)
        try:
            yield
        finally:
            setattr(_config, _NO_STACK_TRACES, original)


_NOT_THE_USERS = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[2]}{os.sep}",
    contextlib.__file__,
    "<",
)


def calling_line() -> str | None:
    """Return file and line of the code that runs, PyTorch's and this library's aside; None without any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextlib.contextmanager
def new_nodes_marked(marks: Mapping[str, Any]) -> Iterator[None]:
    """Put marks into the ``meta`` of every node that is traced meanwhile."""
    mode = _proxy_tensor.get_proxy_mode()
    graph = None if mode is None else mode.tracer.graph
    last = None if graph is None else next(iter(reversed(graph.nodes)), None)
    yield
    for node in itertools.takewhile(
        lambda node: node is not last, () if graph is None else reversed(graph.nodes)
    ):
        node.meta.update(marks)


@contextlib.contextmanager
def _checkpoints_as_in_eager() -> Iterator[None]:
    """Let checkpoints that save some results recompute the others, and those in Dynamo's graphs draw again.

    Under a tracer both leave it to the partitioner of ``torch.compile`` what to recompute, and how.
    """
    with PATCHING:
        in_dynamo: Any = _wrap.TagActivationCheckpoint
        saved = _checkpoint._is_compiling, in_dynamo.__call__
        _checkpoint._is_compiling = lambda *_: False
        in_dynamo.__call__ = _run_checkpoint
        try:
            yield
        finally:
            _checkpoint._is_compiling, in_dynamo.__call__ = saved


def _run_checkpoint(_: Any, body: fx.GraphModule, *inputs: Any, **options: Any) -> Any:
    """Run a checkpoint of a graph of Dynamo's as the user's code would."""
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    options["use_reentrant"] = False
    return _checkpoint.checkpoint(fx.Interpreter(body).run, *inputs, **options)


@contextlib.contextmanager
def _fused_inference_layers() -> Iterator[None]:
    """Let transformer layers take their fused path while tracing, as they do in eager inference.

    They leave it if they see a tracer: by its dispatch mode, or by its function mode, which makes
    ``torch.overrides.has_torch_function`` true of plain tensors.
    """
    with PATCHING:
        saved = torch.overrides.has_torch_function, _activation._is_make_fx_tracing
        torch.overrides.has_torch_function = any_overrides  # type: ignore[assignment]
        _activation._is_make_fx_tracing = lambda: False
        try:
            yield
        finally:
            torch.overrides.has_torch_function, _activation._is_make_fx_tracing = saved


def any_overrides(arguments: Sequence[object]) -> bool:
    """Return True if a tensor's class has a ``__torch_function__`` of its own."""
    inherited: Any = torch.Tensor.__torch_function__
    plain = (inherited.__func__, torch._C._disabled_torch_function_impl)
    methods = (getattr(type(argument), "__torch_function__", None) for argument in arguments)
    return any(method is not None and getattr(method, "__func__", method) not in plain for method in methods)
