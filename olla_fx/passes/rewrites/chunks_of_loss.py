"""The arithmetic of a last linear layer, a cross entropy and their backward in chunks.

:class:`ChunkedLoss` says it once. It calls operators through a function, which runs them
(to probe whether bits are equal) or inserts them into a graph.

**Losses.** ATen's kernel gives the loss of each row of a chunk, and then adds all of them up as it would have
done: it is told one column of log-probabilities, with class 0 as every target, or one to ignore.

**Columns.** With the largest logit ``m`` of a row, and ``s``, the largest log-probability, which is
``(m - m) - log(sum of exp)``, the log-probability of a logit ``x`` is ``(x - m) + s``: the kernel subtracts
in this sequence. The gradient's kernel adds up a row of the gradient of the log-softmax, in which one element
is not zero; a chunk of columns gets one column more, which stands for the target of all rows whose own is not
among them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from olla_fx import operators
from olla_fx.passes.rewrites.cross_entropies import NO_REDUCTION
from olla_fx.passes.rewrites.probes import layout

aten = torch.ops.aten
Call: TypeAlias = Callable[..., Any]
"""Runs an operator with its arguments, or inserts it."""

TILES = 256, 16, 1
"""Chunks are multiples of as many rows as leave two of them: kernels work on tiles."""

_IGNORED = -100
"""Stands for the target of a row that has no loss, where targets are counted from another class."""


class Layer(NamedTuple):
    """Nodes, or tensors.

    Attributes:
        hidden: the layer's input, a row for each target.
        weight: a column for each class.
        bias: a number for each class, or None.
        target: the number of each row's class.
        above: the gradient of the loss.
    """

    hidden: Any
    weight: Any
    bias: Any
    target: Any
    above: Any


class Gradients(NamedTuple):
    """Something for each gradient: of the layer's input, weight (a row for each class) and bias."""

    hidden: Any
    weight: Any
    bias: Any


class Losses(NamedTuple):
    """What forward computes.

    Attributes:
        loss: reduced as the caller wants it.
        total: the number of rows that count.
    """

    loss: Any
    total: Any


@dataclass(frozen=True)
class ChunkedLoss:
    """Sizes and kinds.

    Attributes:
        rows: number of targets.
        classes: number of logits in a row.
        width: of the layer's input.
        count: of the chunks wanted; there are fewer if they would be small.
        product_dtype: of the layer.
        loss_dtype: of the log-softmax.
        reduction: of the loss.
        ignored: the target that has no loss.
        wanted: which gradients are.
        in_columns: True if gradients of weight and bias are computed in columns; False if they are added up
            over chunks of rows, with other last bits.
    """

    rows: int
    classes: int
    width: int
    count: int
    product_dtype: torch.dtype
    loss_dtype: torch.dtype
    reduction: int
    ignored: int
    wanted: Gradients
    in_columns: bool = True

    @property
    def row_chunks(self) -> list[tuple[int, int]]:
        """The first row of each chunk, and the one behind its last."""
        return _chunks(self.rows, self.count)

    @property
    def column_chunks(self) -> list[tuple[int, int]]:
        """Likewise of the columns, if there are any chunks of these."""
        return _chunks(self.classes, self.count) if self.in_columns and self.wants_columns else []

    @property
    def wants_columns(self) -> bool:
        """True if a gradient is wanted that is a sum over all rows."""
        return bool(self.wanted.weight or self.wanted.bias)

    @property
    def is_possible(self) -> bool:
        """True if there are several chunks of everything."""
        return min(len(_chunks(size, self.count)) for size in (self.rows, self.classes)) > 1

    @property
    def largest_chunk_bytes(self) -> int:
        """The bytes of the largest chunk of logits."""
        rows = max(end - start for start, end in self.row_chunks) * self.classes
        columns = max((end - start for start, end in self.column_chunks), default=0) * self.rows
        return max(rows, columns) * self.loss_dtype.itemsize

    def extra_operations(self, *, in_one_pass: bool) -> int:
        """Return the additions and multiplications that the whole computation does not have.

        Args:
            in_one_pass: True if rows go forward and backward at once.
        """
        product = 2 * self.rows * self.classes * self.width
        return product * (bool(self.column_chunks) + (not in_one_pass))

    def question(self, layer: Layer) -> dict[str, Any]:
        """Return all that the answer to a probe depends on."""
        return {
            "loss in chunks": self.count,
            "tiles": TILES,
            "layer": [None if tensor is None else layout(tensor) for tensor in layer],
            "types": [str(self.product_dtype), str(self.loss_dtype)],
            "reduction": self.reduction,
            "wanted": list(self.wanted),
        }

    def forward(self, call: Call, layer: Layer) -> Losses:
        """Compute the loss alone."""
        losses = []
        for chunk in self.row_chunks:
            log_softmax = self._log_softmax(call, self._logits_of_rows(call, layer, chunk))
            losses.append(self._losses_of_rows(call, layer, chunk, log_softmax))
        return self._reduced(call, layer, losses)

    def backward(self, call: Call, layer: Layer, total: Any) -> Gradients:
        """Compute the gradients, with the logits once more."""
        gathered = _Gathered()
        for chunk in self.row_chunks:
            log_softmax = self._noted_log_softmax(call, layer, chunk, gathered)
            self._backward_of_rows(call, layer, chunk, log_softmax, total, gathered)
        return self._gradients(call, layer, total, gathered)

    def at_once(self, forward: Call, backward: Call, layer: Layer) -> tuple[Losses, Gradients]:
        """Compute loss and gradients.

        Args:
            forward: calls what belongs to forward.
            backward: calls what belongs to backward.
            layer: with a gradient of the loss that is known before the loss.
        """
        losses, gathered = [], _Gathered()
        zeros = forward(aten.new_zeros.default, layer.hidden, [self.rows, 1], dtype=self.loss_dtype)
        total = self._of_column(forward, layer, zeros).total
        for chunk in self.row_chunks:
            log_softmax = self._noted_log_softmax(forward, layer, chunk, gathered)
            losses.append(self._losses_of_rows(forward, layer, chunk, log_softmax))
            self._backward_of_rows(backward, layer, chunk, log_softmax, total, gathered)
        return self._reduced(forward, layer, losses), self._gradients(backward, layer, total, gathered)

    def whole(self, call: Call, layer: Layer) -> tuple[Losses, Gradients]:
        """Compute loss and gradients with whole products.

        The gradient of the logits takes the place of the log-softmax, row by row, which changes no bit
        (:mod:`olla_fx.passes.rewrites.loss_gradients`): one array of their size is enough.
        """
        log_softmax = self._log_softmax(call, self._logits(call, *layer[:3]))
        arguments = log_softmax, layer.target, None, self.reduction, self.ignored
        losses = Losses(*call(aten.nll_loss_forward.default, *arguments))
        for chunk in self.row_chunks:
            above = _part(call, layer.above, 0, chunk) if self.reduction == NO_REDUCTION else layer.above
            rows, target = _part(call, log_softmax, 0, chunk), _part(call, layer.target, 0, chunk)
            self._gradient(call, rows, above, target, self.ignored, losses.total)
        gradient = self._converted(call, log_softmax)
        return losses, Gradients(
            call(aten.mm.default, gradient, call(aten.t.default, layer.weight)),
            call(aten.mm.default, call(aten.t.default, gradient), layer.hidden),
            call(aten.sum.dim_IntList, gradient, [0], True),
        )

    def _logits(self, call: Call, hidden: Any, weight: Any, bias: Any) -> Any:
        if bias is None:
            logits = call(aten.mm.default, hidden, weight)
        else:
            logits = call(aten.addmm.default, bias, hidden, weight)
        if self.loss_dtype == self.product_dtype:
            return logits
        return call(aten._to_copy.default, logits, dtype=self.loss_dtype)

    def _logits_of_rows(self, call: Call, layer: Layer, chunk: tuple[int, int]) -> Any:
        return self._logits(call, _part(call, layer.hidden, 0, chunk), layer.weight, layer.bias)

    def _log_softmax(self, call: Call, logits: Any) -> Any:
        return call(aten._log_softmax.out, logits, 1, False, out=logits)

    def _noted_log_softmax(
        self, call: Call, layer: Layer, chunk: tuple[int, int], gathered: _Gathered
    ) -> Any:
        """Return the log-softmax of some rows, and note what tells it again."""
        logits = self._logits_of_rows(call, layer, chunk)
        if self.column_chunks:
            gathered.maxima.append(call(aten.amax.default, logits, [1], True))
        log_softmax = self._log_softmax(call, logits)
        if self.column_chunks:
            gathered.largest.append(call(aten.amax.default, log_softmax, [1], True))
        return log_softmax

    def _losses_of_rows(self, call: Call, layer: Layer, chunk: tuple[int, int], log_softmax: Any) -> Any:
        target = _part(call, layer.target, 0, chunk)
        losses = call(aten.nll_loss_forward.default, log_softmax, target, None, 0, self.ignored)
        return call(operator.getitem, losses, 0)

    def _reduced(self, call: Call, layer: Layer, losses: list[Any]) -> Losses:
        log_probabilities = call(aten.neg.default, call(aten.cat.default, losses))
        return self._of_column(call, layer, call(aten.view.default, log_probabilities, [self.rows, 1]))

    def _of_column(self, call: Call, layer: Layer, log_probabilities: Any) -> Losses:
        first = call(aten.zeros_like.default, layer.target)
        ignored = call(aten.eq.Scalar, layer.target, self.ignored)
        target = call(aten.masked_fill.Scalar, first, ignored, _IGNORED)
        arguments = log_probabilities, target, None, self.reduction, _IGNORED
        losses = call(aten.nll_loss_forward.default, *arguments)
        return Losses(call(operator.getitem, losses, 0), call(operator.getitem, losses, 1))

    def _gradient(
        self, call: Call, log_softmax: Any, above: Any, target: Any, ignored: int, total: Any
    ) -> Any:
        """Return the gradient of logits, over their log-softmax."""
        arguments = above, log_softmax, target, None, self.reduction, ignored, total
        spread = call(aten.nll_loss_backward.default, *arguments)
        last = log_softmax, 1, self.loss_dtype
        return call(aten._log_softmax_backward_data.out, spread, *last, out=log_softmax)

    def _converted(self, call: Call, gradient: Any) -> Any:
        if self.loss_dtype == self.product_dtype:
            return gradient
        return call(aten._to_copy.default, gradient, dtype=self.product_dtype)

    def _backward_of_rows(
        self,
        call: Call,
        layer: Layer,
        chunk: tuple[int, int],
        log_softmax: Any,
        total: Any,
        gathered: _Gathered,
    ) -> None:
        above = _part(call, layer.above, 0, chunk) if self.reduction == NO_REDUCTION else layer.above
        target = _part(call, layer.target, 0, chunk)
        gradient = self._gradient(call, log_softmax, above, target, self.ignored, total)
        gradient = self._converted(call, gradient)
        if self.wanted.hidden:
            if gathered.hidden is None:
                size = [self.rows, self.width]
                gathered.hidden = call(aten.new_empty.default, layer.hidden, size)
            into = _part(call, gathered.hidden, 0, chunk)
            back = call(aten.t.default, layer.weight)
            gathered.hidden_parts.append(call(aten.mm.out, gradient, back, out=into))
        if not self.column_chunks:
            self._add_up(call, _part(call, layer.hidden, 0, chunk), gradient, gathered)

    def _add_up(self, call: Call, hidden: Any, gradient: Any, gathered: _Gathered) -> None:
        """Add the part of some rows to the gradients of weight and bias."""
        if self.wanted.weight:
            transposed = call(aten.t.default, gradient)
            if gathered.weight is None:
                gathered.weight = call(aten.mm.default, transposed, hidden)
            else:
                gathered.weight = call(aten.addmm_.default, gathered.weight, transposed, hidden)
        if self.wanted.bias:
            part = call(aten.sum.dim_IntList, gradient, [0], True)
            if gathered.bias is None:
                gathered.bias = part
            else:
                gathered.bias = call(aten.add_.Tensor, gathered.bias, part)

    def _gradients(self, call: Call, layer: Layer, total: Any, gathered: _Gathered) -> Gradients:
        hidden = gathered.hidden
        if hidden is not None:
            hidden = call(operators.filled_, hidden, gathered.hidden_parts)
        if not self.column_chunks:
            return Gradients(hidden, gathered.weight, gathered.bias)
        notes = [call(aten.cat.default, parts) for parts in (gathered.maxima, gathered.largest)]
        weight = None
        if self.wanted.weight:
            weight = call(aten.new_empty.default, layer.hidden, [self.classes, self.width])
        ignored = call(aten.eq.Scalar, layer.target, self.ignored)
        parts, biases = [], []
        for chunk in self.column_chunks:
            gradient = self._gradient_of_columns(call, layer, chunk, notes, ignored, total)
            if weight is not None:
                into, transposed = _part(call, weight, 0, chunk), call(aten.t.default, gradient)
                parts.append(call(aten.mm.out, transposed, layer.hidden, out=into))
            if self.wanted.bias:
                biases.append(call(aten.sum.dim_IntList, gradient, [0], True))
        bias = call(aten.cat.default, biases, 1) if biases else None
        return Gradients(hidden, weight if weight is None else call(operators.filled_, weight, parts), bias)

    def _gradient_of_columns(
        self,
        call: Call,
        layer: Layer,
        chunk: tuple[int, int],
        notes: Sequence[Any],
        ignored: Any,
        total: Any,
    ) -> Any:
        """Return the gradient of some columns of logits.

        The column after the chunk, or the one before it if it is the last, has all other targets.
        """
        start, end = chunk
        first, last = (start, end + 1) if end < self.classes else (start - 1, end)
        bias = None if layer.bias is None else _part(call, layer.bias, 0, (first, last))
        logits = self._logits(call, layer.hidden, _part(call, layer.weight, 1, (first, last)), bias)
        maxima, largest = notes
        shifted = call(aten.sub_.Tensor, logits, maxima)
        log_softmax = call(aten.add_.Tensor, shifted, largest)
        below = call(aten.lt.Scalar, layer.target, start)
        outside = call(aten.logical_or.default, below, call(aten.ge.Scalar, layer.target, end))
        others = end - first if end < self.classes else 0
        target = call(aten.sub.Tensor, layer.target, first)
        target = call(aten.masked_fill.Scalar, target, outside, others)
        target = call(aten.masked_fill.Scalar, target, ignored, _IGNORED)
        gradient = self._gradient(call, log_softmax, layer.above, target, _IGNORED, total)
        columns = _part(call, gradient, 1, (start - first, end - first))
        return self._converted(call, columns)


@dataclass
class _Gathered:
    """What chunks leave."""

    hidden: Any = None
    hidden_parts: list[Any] = field(default_factory=list)
    weight: Any = None
    bias: Any = None
    maxima: list[Any] = field(default_factory=list)
    largest: list[Any] = field(default_factory=list)


def _part(call: Call, tensor: Any, dimension: int, chunk: tuple[int, int]) -> Any:
    return call(aten.slice.Tensor, tensor, dimension, *chunk)


def _chunks(size: int, count: int) -> list[tuple[int, int]]:
    """Cut a size into intervals of whole tiles, the last of which has what is left, too."""
    tile = next((tile for tile in TILES if size >= 2 * tile), 1)
    tiles = size // tile
    count = min(count, tiles)
    starts = [tile * (tiles * index // count) for index in range(count)]
    return list(zip(starts, [*starts[1:], size], strict=True))
