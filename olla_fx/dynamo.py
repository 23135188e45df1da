"""Plans every graph that Dynamo cuts out: the backend of ``torch.compile(model, backend="olla_fx")``.

A piece is planned like a module in the caller's own loop, forward and backward together, when it is first
called with inputs of a new kind, so that sizes that Dynamo left open are known. Parameters and buffers
reach it as inputs. Pieces on both sides of a graph break are alive together, so they hold a segment each. A
piece that cannot be captured runs as by AOTAutograd, with one warning. :func:`compiled_reports` lists
the reports of all pieces that have a plan.
"""

from __future__ import annotations

import collections
import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import Mode, StepRequest
from olla_fx.errors import CaptureError, StepInputError
from olla_fx.options import Options
from olla_fx.run import PlannedModule
from olla_fx.run.calls import shows_the_model
from olla_fx.run.stats import StepReport
from olla_solvers.errors import OptionError

OPTIONS = frozenset(
    {
        "solver", "time_limit", "rewrites", "recompute", "memory_budget", "memory_budget_includes",
        "loss_chunks", "swap", "link", "cache_size_limit",
    }
)  # fmt: skip
"""The options of :func:`olla_fx.optimize` that the backend takes."""

_pieces: weakref.WeakValueDictionary[int, PlannedPiece] = weakref.WeakValueDictionary()
"""The pieces that Dynamo holds on to, in the order in which it cut them out."""
_piece_numbers = itertools.count()


def compiled_reports() -> list[StepReport]:
    """Return the reports of the planned graphs of ``torch.compile``, in the order of their making.

    Graphs that no compiled model uses any longer are left out, and so are those that run without a plan or
    have not been called yet.
    """
    modules = [piece.module for _, piece in sorted(_pieces.items())]
    return [module.report() for module in modules if module is not None]


class PlannedPiece:
    """One graph, planned at its first call.

    Attributes:
        module: the planned module; None before the first call, and if the graph runs without a plan.
    """

    def __init__(self, graph_module: fx.GraphModule, options: Mapping[str, Any]) -> None:
        """Keep the graph.

        Args:
            graph_module: Dynamo's.
            options: those of :data:`OPTIONS`.
        """
        self._piece = DynamoPiece(graph_module)
        self._options = Options(fallback="raise", **options)
        self._unplanned = UnplannedPiece(self._piece, self._options.cache_size_limit)
        self._is_refused = False
        self.module: PlannedModule | None = None
        _pieces[next(_piece_numbers)] = self

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        values = self._piece.with_numbers(inputs)
        if torch_compat.is_transformed() or torch_compat.is_observed():
            return self._piece(*values)
        if self._is_refused or shows_the_model():
            return self._unplanned(values)
        try:
            if self.module is None:
                request = StepRequest(self._piece, values, Mode.AUTOGRAD, options=self._options)
                self.module = PlannedModule(request)
            return self.module(*values)
        except (CaptureError, StepInputError) as error:
            self._is_refused, self.module = True, None
            warnings.warn(
                f"a graph of {self._piece.size} operators runs without a plan: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._unplanned(values)


class UnplannedPiece:
    """A graph run by AOTAutograd, compiled once for each kind of call.

    What AOTAutograd compiles from real inputs is valid for their sizes and numbers alone.
    """

    def __init__(self, piece: DynamoPiece, most_kinds: int) -> None:
        """Compile nothing yet.

        Args:
            piece: the graph.
            most_kinds: the number of kinds of calls whose compiled function is kept.
        """
        self._most_kinds = most_kinds
        self._piece = piece
        self._compiled: collections.OrderedDict[Hashable, Callable[..., Any]] = collections.OrderedDict()

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """Run the graph.

        Args:
            values: its inputs, numbers not as tensors.
        """
        key = _kinds(values)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = torch_compat.run_unplanned(self._piece.piece, values)
        self._compiled.move_to_end(key)
        while len(self._compiled) > self._most_kinds:
            self._compiled.popitem(last=False)
        return compiled(*values)


def _kinds(values: Sequence[Any]) -> Hashable:
    """Return what distinguishes calls: sizes, types, gradients, shared storages, and numbers."""
    kinds: list[Hashable] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    storages: dict[object, int] = {}
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            kinds.append((type(value), repr(value)))
            continue
        kinds.append((type(value), value.shape, value.dtype, value.device, value.layout, value.requires_grad))
        if value.layout is torch.strided:
            kinds.append((value.stride(), storages.setdefault(torch_compat.storage_key(value), index)))
    return tuple(kinds)


class DynamoPiece(nn.Module):
    """A graph of Dynamo's as a module that takes numbers, not tensors that hold them.

    If Dynamo leaves a Python float open (``dynamic=True``), it passes a tensor and reads its value in the
    graph, which would depend on data. A number among the inputs makes a plan of its own instead.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        """Copy a graph, without its reads of numbers."""
        super().__init__()
        graph = copy.deepcopy(graph_module.graph)
        self.piece = fx.GraphModule(graph_module, graph)
        placeholders = graph.find_nodes(op="placeholder")
        self._numbers = {index for index, node in enumerate(placeholders) if _is_number(self.piece, node)}
        for index in self._numbers:
            self._take_number(placeholders[index])
        self.piece.recompile()
        self.size = sum(node.op.startswith("call") for node in graph.nodes)

    def _take_number(self, placeholder: fx.Node) -> None:
        """Remove the reads of a placeholder's value, also from the checkpoints that take it."""
        for user in list(placeholder.users):
            if _reads_value(user):
                user.replace_all_uses_with(placeholder)
                user.graph.erase_node(user)
                continue
            name, body = _checkpointed(self.piece, user)
            body = fx.GraphModule(body, copy.deepcopy(body.graph))
            for inner in _inner_placeholders(body, user, placeholder):
                for read in list(inner.users):
                    read.replace_all_uses_with(inner)
                    body.graph.erase_node(read)
            body.recompile()
            setattr(self.piece, name, body)

    def with_numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inputs; those of which the graph reads only the number as numbers."""
        pairs = enumerate(inputs)
        return tuple(value.item() if index in self._numbers else value for index, value in pairs)

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        # Not by __call__: fx would print a traceback of an error that the refusal explains.
        return self.piece.forward(*inputs)


def _reads_value(node: fx.Node) -> bool:
    return (node.op, node.target) == ("call_method", "item")


def _is_number(piece: fx.GraphModule, placeholder: fx.Node) -> bool:
    """Return True if a graph, and the checkpoints in it, only read a placeholder's value."""
    for user in placeholder.users:
        if _reads_value(user):
            continue
        if user.target is not torch.ops.higher_order.tag_activation_checkpoint:
            return False
        _, body = _checkpointed(piece, user)
        for inner in _inner_placeholders(body, user, placeholder):
            if not inner.users or not all(map(_reads_value, inner.users)):
                return False
    return bool(placeholder.users)


def _checkpointed(piece: fx.GraphModule, checkpoint: fx.Node) -> tuple[str, fx.GraphModule]:
    """Return the name and the graph of a checkpoint's body."""
    name = str(checkpoint.args[0].target)  # type: ignore[union-attr]
    return name, piece.get_submodule(name)  # type: ignore[return-value]


def _inner_placeholders(body: fx.GraphModule, checkpoint: fx.Node, passed: fx.Node) -> list[fx.Node]:
    """Return the placeholders by which a checkpoint's graph receives an argument."""
    placeholders = body.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, checkpoint.args[1:], strict=False)
    return [placeholder for placeholder, argument in pairs if argument is passed]


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> PlannedPiece:
    """Compile a graph of Dynamo's: the entry point ``olla_fx`` of ``torch_dynamo_backends``.

    Args:
        graph_module: captured by Dynamo.
        example_inputs: fake; unused, as planning waits for the first call.
        options: ``torch.compile(..., options={"solver": ..., ...})``: those of :data:`OPTIONS`.

    Returns:
        The callable that Dynamo calls in the graph's place.

    Raises:
        OptionError: if an option is unknown.
    """
    options = dict(options or {})
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        known = ", ".join(sorted(OPTIONS))
        raise OptionError(f"the backend olla_fx has no option {unknown[0]!r}: one of {known}")
    return PlannedPiece(graph_module, options)
