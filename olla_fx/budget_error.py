"""Says why a step does not fit into its memory budget: what is needed, where, and what would lower it."""

from __future__ import annotations

from olla_fx.capture import Mode
from olla_fx.dataflow import Dataflow
from olla_fx.errors import BudgetError
from olla_fx.fx_graph import source_of
from olla_fx.report.table import format_bytes
from olla_fx.step_plan import Plan
from olla_solvers.analysis import resident_bytes


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
        f"{array.name} ({format_bytes(array.size_bytes)}, "
        f"{f'made at {array.source}' if array.source else 'made in backward'})"
        for array in plan.largest
    )
    text = (
        f"no plan within the memory budget of {format_bytes(terms.budget_bytes)} was found: the smallest "
        f"needs {format_bytes(plan.needed_bytes)} ({', '.join(parts)}), and {proven}. Most is alive at "
        f"{node.name}{f' ({source})' if source else ''}; the largest arrays then are {largest}. Take "
        f"{_advice(plan, dataflow, mode)}"
    )
    return BudgetError(text, plan.needed_bytes, is_proven=terms.is_impossible)


def _operator_at_peak(plan: Plan) -> int:
    index = {operator.name: position for position, operator in enumerate(plan.problem.operators)}
    order = [index[name] for name in plan.order]
    resident = resident_bytes(plan.problem, order)
    return order[max(range(len(order)), key=resident.__getitem__)]


def _advice(plan: Plan, dataflow: Dataflow, mode: Mode) -> str:
    """Return what would lower the peak."""
    ways = ["a smaller batch"]
    if mode is Mode.TRAINING:
        ways.append("more accumulation_steps" if plan.micro_batches > 1 else "accumulation_steps")
    targets = " ".join(str(node.target) for node in dataflow.operators)
    is_chunked = any(change.rewrite == "chunked_loss" for change in plan.changes)
    if mode is Mode.AUTOGRAD:
        ways.append("a whole training step (loss_fn and optimizer), which uses gradients as they come")
    if mode is not Mode.INFERENCE and not is_chunked and "nll_loss" in targets:
        ways.append("loss_chunks")
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
