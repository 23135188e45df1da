"""Says why a step does not fit into its memory budget: what is needed, where, and what would lower it."""

from __future__ import annotations

import torch

from olla_fx.capture import Mode
from olla_fx.dataflow import Dataflow
from olla_fx.errors import BudgetError
from olla_fx.fx_graph import source_of
from olla_fx.passes.rewrites.edit import bytes_of
from olla_fx.recomputed import BudgetTerms
from olla_fx.report.table import format_bytes
from olla_fx.step_plan import Plan
from olla_solvers.analysis import resident_bytes

LARGE = 0.1
"""Share of the peak from which on logits are worth computing in chunks."""


def budget_error(plan: Plan, dataflow: Dataflow, mode: Mode) -> BudgetError:
    """Return the error about a plan that is not within its budget.

    Args:
        plan: the smallest that was found.
        dataflow: of it.
        mode: of the step.
    """
    if plan.budget is None:
        raise ValueError("the plan has no budget")
    terms = plan.budget
    in_bytes = format_bytes(terms.budget_bytes), format_bytes(plan.needed_bytes)
    if in_bytes[0] == in_bytes[1]:
        in_bytes = f"{terms.budget_bytes:,} B", f"{plan.needed_bytes:,} B"
    parts = [f"buffer {format_bytes(plan.buffer_bytes)}", f"outputs {format_bytes(plan.output_bytes)}"]
    if plan.gradient_bytes:
        parts.append(f"gradients outside the buffer {format_bytes(plan.gradient_bytes)}")
    if terms.includes_static:
        parts.append(f"static arrays {format_bytes(plan.static_bytes)}")
    proven = (
        "less than that is proven impossible"
        if terms.least_bytes >= plan.needed_bytes
        else f"at least {format_bytes(terms.least_bytes)} are proven necessary"
    )
    node = dataflow.operators[_operator_at_peak(plan)]
    source = source_of(node)
    largest = ", ".join(
        f"{array.name} ({format_bytes(array.size_bytes)}, {array.made_at})" for array in plan.largest
    )
    text = (
        f"no plan within the memory budget of {in_bytes[0]} was found: the smallest "
        f"needs {in_bytes[1]} ({', '.join(parts)}), and {proven}. Most is alive at "
        f"{node.name}{f' ({source})' if source else ''}; the largest arrays then are {largest}. "
        f"{_advice(plan, terms, dataflow, mode)}"
    )
    return BudgetError(text, plan.needed_bytes, is_proven=terms.is_impossible)


def _operator_at_peak(plan: Plan) -> int:
    order = plan.problem.indices_of(plan.order)
    resident = resident_bytes(plan.problem, order)
    return order[max(range(len(order)), key=resident.__getitem__)]


def _advice(plan: Plan, terms: BudgetTerms, dataflow: Dataflow, mode: Mode) -> str:
    """Return what would help."""
    if terms.includes_static and plan.static_bytes >= terms.budget_bytes:
        return (
            "Parameters, state and inputs alone take the whole budget: take a larger one, or leave "
            "memory_budget_includes='static' out"
        )
    ways = ["a smaller batch"]
    if mode is Mode.TRAINING:
        ways.append("more accumulation_steps" if plan.micro_batches > 1 else "accumulation_steps")
    if mode is not Mode.INFERENCE and _has_large_logits(plan, dataflow):
        ways.append("loss_chunks")
    if mode is Mode.AUTOGRAD:
        ways.append("a whole training step (loss_fn and optimizer; it uses gradients as they come)")
    told = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
    return f"Take {told}"


def _has_large_logits(plan: Plan, dataflow: Dataflow) -> bool:
    """Return True if a loss reads whole logits that are a large share of the peak."""
    if any(change.rewrite == "chunked_loss" for change in plan.changes):
        return False
    losses = [node for node in dataflow.operators if node.target is torch.ops.aten.nll_loss_forward.default]
    logits_bytes = max((bytes_of(node.all_input_nodes[0]) for node in losses), default=0)
    return logits_bytes > LARGE * plan.peak_bytes
