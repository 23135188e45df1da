"""Traces a function by AOTAutograd into one functional graph, as eager would compute it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import aot_autograd as _aot_autograd
from torch._functorch._aot_autograd import graph_compile as _graph_compile
from torch._higher_order_ops import wrap as _wrap
from torch.fx import _lazy_graph_module
from torch.fx import config as _config
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.nn.modules import activation as _activation
from torch.utils import checkpoint as _checkpoint

from olla_fx.torch_compat.composite import composite_operators_as_in_eager
from olla_fx.torch_compat.patches import PATCHING

_NO_STACK_TRACES = "do_not_emit_stack_traces"
_TENSORIFY = "tensorify_python_scalars"


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
        _without_stack_traces(),
        _lazy_graph_module._use_lazy_graph_module(True),
        composite_operators_as_in_eager(),
        _fused_inference_layers(),
        _checkpoints_as_in_eager(),
    ):
        traced(*arguments)
    return graphs[0]


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
def _scalars_left_as_python_numbers() -> Iterator[None]:
    """Keep AOTAutograd from turning Python float arithmetic into tensor arithmetic.

    ``tensorify_python_scalars`` rewrites ``x * lr`` into operators on 0-dim float64 tensors rounded to
    float32 on the way, which is not what eager computes.
    """
    with PATCHING:
        original = getattr(_graph_compile, _TENSORIFY)
        setattr(_graph_compile, _TENSORIFY, lambda *_: None)
        try:
            yield
        finally:
            setattr(_graph_compile, _TENSORIFY, original)


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
