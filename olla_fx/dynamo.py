"""``torch.compile(model, backend="olla_fx")``: every graph that Dynamo cuts out, planned and in one buffer.

A piece is planned like a module in the caller's own loop, forward and backward together, when it is first
called with inputs of a new kind, so that sizes which Dynamo left open are known. Parameters and buffers
reach it as inputs. Pieces on both sides of a graph break are alive together, so each has a buffer of its
own. A piece that cannot be captured runs as AOTAutograd has it, with one warning.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.api import plan_options
from olla_fx.capture import Mode, StepRequest
from olla_fx.errors import CaptureError, StepInputError
from olla_fx.run import PlannedModule
from olla_solvers.errors import OptionError


class PlannedPiece:
    """One graph, planned at its first call.

    Attributes:
        module: the planned module; None before the first call, and where the graph runs as it is.
    """

    def __init__(self, graph_module: fx.GraphModule, options: Mapping[str, Any]) -> None:
        """Keep the graph.

        Args:
            graph_module: Dynamo's.
            options: ``solver`` and ``time_limit`` of :func:`olla_fx.optimize`.
        """
        self._graph_module = graph_module
        self._piece = DynamoPiece(graph_module)
        self._compiler = plan_options(**options)
        self._unplanned: Callable[..., Any] | None = None
        self.module: PlannedModule | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if self._unplanned is None:
            planned = self._piece.with_numbers(inputs)
            try:
                if self.module is None:
                    request = StepRequest(self._piece, planned, Mode.AUTOGRAD)
                    self.module = PlannedModule(request, self._compiler)
                return self.module(*planned)
            except (CaptureError, StepInputError) as error:
                self._unplanned = torch_compat.run_unplanned(self._graph_module, inputs)
                self.module = None
                warnings.warn(
                    f"a graph of {_size(self._graph_module)} operators runs without a plan: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._unplanned(*inputs)


class DynamoPiece(nn.Module):
    """A graph of Dynamo's as a module that takes numbers as numbers.

    Where Dynamo leaves a Python float open (``dynamic=True``), it passes a tensor and asks for its value in
    the graph, which would depend on data. A number among the inputs makes a plan of its own instead.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        """Copy a graph, without its questions for values."""
        super().__init__()
        graph = copy.deepcopy(graph_module.graph)
        self._numbers: set[int] = set()
        for index, placeholder in enumerate(graph.find_nodes(op="placeholder")):
            users = list(placeholder.users)
            if users and all((each.op, each.target) == ("call_method", "item") for each in users):
                self._numbers.add(index)
                for each in users:
                    each.replace_all_uses_with(placeholder)
                    graph.erase_node(each)
        self.piece = fx.GraphModule(graph_module, graph)

    def with_numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs, with the values of those that the graph only asks for theirs."""
        return tuple(each.item() if index in self._numbers else each for index, each in enumerate(inputs))

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        # Not by calling it: fx would print a traceback of what is refused with an explanation.
        return self.piece.forward(*inputs)


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> PlannedPiece:
    """The entry point ``olla_fx`` of ``torch_dynamo_backends``.

    Args:
        graph_module: what Dynamo captured.
        example_inputs: fake; not needed, as planning waits for the first call.
        options: ``torch.compile(..., options={"solver": ..., "time_limit": ...})``.

    Returns:
        What Dynamo calls in the graph's place.

    Raises:
        OptionError: when an option is unknown.
    """
    options = dict(options or {})
    unknown = sorted(options.keys() - {"solver", "time_limit"})
    if unknown:
        raise OptionError(f"the backend olla_fx has no option {unknown[0]!r}: solver and time_limit are all")
    return PlannedPiece(graph_module, options)


def _size(graph_module: fx.GraphModule) -> int:
    return sum(node.op.startswith("call") for node in graph_module.graph.nodes)
