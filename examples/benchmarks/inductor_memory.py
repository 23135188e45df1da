"""Estimates what forward and backward of a training step need as ``torch.compile``'s inductor would run them.

The estimate is inductor's own: its passes on the joint graph, its partitioner into forward and backward, its
lowering, fusion and reordering for memory run as they do for a CPU; then the scheduler is asked for the peak
of its order instead of code. Nothing of the model runs. Parameters, buffers and inputs are not counted,
gradients and activations are; the update is not part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from ordering import TOKENS
from torch._functorch import config as partitioner_settings
from torch._inductor import compile_fx, memory, scheduler
from torch._inductor.exc import InductorError
from torch._inductor.virtualized import V

from olla_fx.models import build_model


class EstimatedError(Exception):
    """Ends the compilation of a graph whose peak is known."""


class RunError(Exception):
    """Says that both graphs were compiled, and that the step would run now."""


def do_not_run(*_: Any) -> None:
    """Stand for a compiled graph."""
    raise RunError


do_not_run._boxed_call = True  # type: ignore[attr-defined]


def compile_without_code(graph_module: Any, *arguments: Any, **options: Any) -> Any:
    """Compile a graph up to where the scheduler's code would be written."""
    try:
        compile_fx.compile_fx_inner(graph_module, *arguments, **options)
    except InductorError as error:
        if not isinstance(error.inner_exception, EstimatedError):
            raise
    return do_not_run


@contextmanager
def peaks_instead_of_code() -> Iterator[dict[str, int]]:
    """Let inductor's schedulers estimate a peak where they would write code.

    Yields:
        Bytes of ``forward`` and ``backward``, once these were compiled.
    """
    peaks: dict[str, int] = {}

    def estimate(self: Any) -> None:
        graph = V.graph
        peak_bytes, _ = memory.prepare_planning_info(
            self.nodes,
            self.name_to_buf,
            self.name_to_fused_node,
            memory.OrderedSet(graph.graph_inputs.keys()),
            memory.OrderedSet(graph.get_output_names()),
        )
        peaks["backward" if graph.is_backward else "forward"] = int(peak_bytes)
        raise EstimatedError

    code = scheduler.Scheduler.codegen
    scheduler.Scheduler.codegen = estimate
    try:
        yield peaks
    finally:
        scheduler.Scheduler.codegen = code


def inductor_bytes(name: str, batch: int, budget: float) -> dict[str, int]:
    """Return the estimated peaks of a step's forward and backward.

    Args:
        name: of a model.
        batch: examples in a batch.
        budget: ``torch._functorch.config.activation_memory_budget``; 1.0 is the default.

    Returns:
        Bytes of ``forward`` and ``backward`` without parameters and inputs.
    """
    case = build_model(name, batch_size=batch, tokens=TOKENS)
    loss_fn = case.loss_fn
    if loss_fn is None:
        raise ValueError(f"{name} has no loss")
    *inputs, target = case.inputs

    settings = {"activation_memory_budget": budget, "force_non_lazy_backward_lowering": True}
    backend = partial(compile_fx.compile_fx, inner_compile=compile_without_code)

    def step() -> torch.Tensor:
        return loss_fn(case.model(*inputs), target)

    with partitioner_settings.patch(settings), peaks_instead_of_code() as peaks:
        try:
            torch.compile(step, backend=backend, fullgraph=True)()
        except RunError:
            pass
    return peaks


def main() -> int:
    """Print the estimate of one step as a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--budget", type=float, default=1.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    print(json.dumps(inductor_bytes(options.model, options.batch_size, options.budget)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
