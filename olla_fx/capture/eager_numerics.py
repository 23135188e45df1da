"""Traces operators so that the graph does what eager does with them, to the last bit.

**In-place operators keep their strides.** ``gates.chunk(3, 1)[0].sigmoid_()`` leaves its result in the
rows of ``gates``. Functionalisation makes it ``sigmoid``, whose result is dense, and every later kernel
then walks memory in another way: it takes whole rows at once, in vectors, where eager's takes one row at a
time and a scalar tail, which rounds ``exp`` differently. Such an operator is traced as its functional form
and ``copy`` of the result into the strides of its argument; :mod:`olla_fx.passes.reinplace` puts the two
together again.

**oneDNN's LSTM**, which a graph cannot call as it is, becomes operators of :mod:`olla_fx.operators`.

**Recomputed draws** draw what they drew in forward (:mod:`olla_fx.capture.recomputation`).

**Values that follow from constants and inputs** are known if Python asks
(:mod:`olla_fx.capture.values.constant_folding`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from olla_fx import operators, torch_compat
from olla_fx.capture.recomputation import Draws
from olla_fx.capture.symbols.sizes import SymbolicSizes
from olla_fx.capture.values.constant_folding import ConstantFolding
from olla_fx.capture.values.questions import Questions
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import IN_BACKWARD, RECOMPUTED, SOURCE, may_draw
from olla_fx.torch_compat import overload_name, schema_of

aten = torch.ops.aten
_SELF_ATTENTION = aten._native_multi_head_attention.default


class EagerNumerics(ConstantFolding):  # type: ignore[no-untyped-call]
    """While on, operators are traced as eager runs them; see the module docstring.

    Attributes:
        draws: the random operators so far.
        recomputed: the number of operators that checkpoints' recomputations ran.
        in_backward: set to True while the backward of the step is traced; its nodes are marked.
    """

    def __init__(self, questions: Questions, symbols: SymbolicSizes | None, *, keeps_draws: bool) -> None:
        """Start without traced operators.

        Args:
            questions: answers what is asked of inputs.
            symbols: stand for numbers among the answers.
            keeps_draws: True if a checkpoint's recomputation takes what forward drew.
        """
        super().__init__(questions, symbols)
        self.draws = Draws(keeps_results=keeps_draws)
        self.recomputed = 0
        self.in_backward = False

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace one operator; mark what backward and recomputations add to the graph."""
        is_recomputed = torch_compat.is_recomputing()
        self.recomputed += is_recomputed and not operator.is_view
        if not self.in_backward:
            with torch_compat.new_nodes_marked({SOURCE: torch_compat.calling_line()}):
                return self._run(operator, args, kwargs)
        with torch_compat.new_nodes_marked({IN_BACKWARD: True, RECOMPUTED: is_recomputed}):
            return self._run(operator, args, kwargs)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is aten.bernoulli_.float and not args[0].is_contiguous():
            self.draws.draw(operator, (_in_order_of_memory(args[0]), *args[1:]), kwargs)
            return args[0]
        if operator.namespace != "olla_fx" and may_draw(operator):
            return self.draws.draw(operator, args, kwargs)
        replacement = _REPLACEMENTS.get(operator)
        if replacement is not None:
            return replacement(*args, **kwargs)
        functional = _functional_form(operator) if schema_of(operator).is_mutable else None
        if functional is None or _is_dense(args[0]):
            return super().run(operator, args, kwargs)
        target = args[0]
        result = functional(*args, **kwargs)
        if result.shape != target.shape or result.dtype != target.dtype:
            return operator(*args, **kwargs)
        return target.copy_(result)


def _in_order_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Permute a tensor's dimensions from the outermost in memory to the innermost.

    In-place draws go through memory in its order. Of their functional forms ``bernoulli`` alone does not: its
    result is contiguous, whatever its argument is.
    """
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _lstm_layer(*arguments: Any) -> Any:
    # Without gradients eager runs the kernel for inference.
    operator = operators.lstm_layer if torch.is_grad_enabled() else aten.mkldnn_rnn_layer.default
    return operator(*arguments)


def _lstm_layer_backward(*arguments: Any) -> Any:
    return operators.with_both_bias_gradients(operators.lstm_layer_backward(*arguments))


def _self_attention(*arguments: Any, **options: Any) -> Any:
    """Return attention weights only if asked, as the fused kernel does; its fake form always returns them."""
    names = [argument.name for argument in schema_of(_SELF_ATTENTION).arguments]
    position = names.index("need_weights")
    attended, weights = _SELF_ATTENTION(*arguments, **options)
    need_weights = options.get("need_weights", True) if position >= len(arguments) else arguments[position]
    return attended, weights if need_weights else None


def _refuse_nested(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "nn.TransformerEncoder packs a batch with src_key_padding_mask into nested tensors, whose shapes "
        "depend on the mask. Make it with enable_nested_tensor=False"
    )


def _refuse_linear_algebra_checks(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "the model calls aten._linalg_check_errors, which raises on bad data (a singular matrix, say); a "
        "captured step cannot keep that. Use the form without it (torch.linalg.inv_ex, solve_ex, "
        "cholesky_ex, ...), or move that part out of the model"
    )


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    _SELF_ATTENTION: _self_attention,
    aten._nested_tensor_from_mask_left_aligned.default: _refuse_nested,
    aten._nested_tensor_from_mask.default: _refuse_nested,
    # Not every release of torch counts it among the operators with effects, which it keeps in order.
    aten._linalg_check_errors.default: _refuse_linear_algebra_checks,
}


def _functional_form(operator: torch_compat.OpOverload) -> torch_compat.OpOverload | None:
    """Return the functional form of an in-place operator; None without one, or if it draws random numbers."""
    name = schema_of(operator).name.removeprefix("aten::")
    if operator.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    if operator is aten.copy_.default or torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    functional = getattr(getattr(aten, name.removesuffix("_"), None), overload_name(operator), None)
    if not isinstance(functional, torch_compat.OpOverload) or schema_of(functional).is_mutable:
        return None
    names = [argument.name for argument in schema_of(operator).arguments]
    return functional if names == [argument.name for argument in schema_of(functional).arguments] else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
