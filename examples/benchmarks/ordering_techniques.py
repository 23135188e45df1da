"""Measures what each technique is worth: of the integer programs, and of the default path.

``programs`` states the ordering program (OLLA equation 14) of each graph with all techniques and without
each; the same uncontracted, where contraction hides nothing; and literally, with each technique alone.
``joint`` does so for order and addresses in one program (equation 9), on the step of a small perceptron.
``rules`` orders the graphs by the default methods with all rules and without each.

    python examples/benchmarks/ordering_techniques.py programs captured/alexnet_1_sgd.json --solver highs
    python examples/benchmarks/ordering_techniques.py joint --solver highs
    python examples/benchmarks/ordering_techniques.py rules captured/*.json --time-limit 6
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from olla_solvers.effort.patience import Patience
from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp import backends
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, LITERAL, Techniques
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.search import ALL_RULES, SearchRules
from olla_solvers.paper.joint import joint_plan
from olla_solvers.paper.ordering import Anchors, order_with_techniques
from olla_solvers.problem import Problem

OF_THE_PAPER = ("spans", "useful_lifetimes", "preserved", "precedence", "shared_outputs")
"""Techniques of the ordering program that do not change the graph."""

JOINT = (*OF_THE_PAPER, "resident_sets")
"""Those of the joint program."""

MIB = 1 << 20


def program_variants() -> Iterator[tuple[str, Techniques, Anchors]]:
    """Yield names, techniques and early updates of the ordering program."""
    uncontracted = replace(ALL_TECHNIQUES, contract=False, pieces=False)
    for label, base, extra in (
        ("", ALL_TECHNIQUES, ("contract", "pieces")),
        ("uncontracted, ", uncontracted, ()),
    ):
        yield f"{label}all", base, Anchors.SAFE
        for name in (*OF_THE_PAPER, *extra):
            yield f"{label}without {name}", replace(base, **{name: False}), Anchors.SAFE
        yield f"{label}without early_updates", base, Anchors.NONE
    yield "uncontracted, the paper's anchors", uncontracted, Anchors.PAPER
    yield "literal", LITERAL, Anchors.NONE
    for name in (*OF_THE_PAPER, "contract", "pieces"):
        yield f"literal, with {name}", replace(LITERAL, **{name: True}), Anchors.NONE
    yield "literal, with early_updates", LITERAL, Anchors.SAFE


def joint_variants() -> Iterator[tuple[str, Techniques]]:
    """Yield names and techniques of the joint program."""
    yield "all", ALL_TECHNIQUES
    for name in JOINT:
        yield f"without {name}", replace(ALL_TECHNIQUES, **{name: False})
    yield "literal", LITERAL


def perceptron_step() -> Problem:
    """Return a training step of three layers, captured under fake tensors."""
    import torch
    from torch import nn

    import olla_fx

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    example = (torch.zeros(16, 64), torch.zeros(16, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    plan = olla_fx.plan(model, example, loss_fn=loss, optimizer=optimizer, solver="none")
    return plan.problem


def compare_programs(paths: Sequence[Path], solver: str, limit: float, wanted: Sequence[str]) -> None:
    """Print a line for each variant of the ordering program that is wanted; all if none is named."""
    for path in paths:
        problem = Problem.load(path)
        print(
            f"{path.stem}, {solver}, {limit:g} s: variables, constraints, seconds, status, peak, bound (MiB)"
        )
        for name, techniques, anchors in program_variants():
            if wanted and name not in wanted:
                continue
            schedule = order_with_techniques(
                problem, solver=solver, time_limit=limit, techniques=techniques, anchors=anchors
            )
            report = schedule.solver
            print(
                f"| {name} | {report.variables:,} | {report.constraints:,} | {report.seconds:.2f} "
                f"| {report.status.value} | {_mib(schedule.peak_bytes)} | {_mib(report.bound_bytes)} |",
                flush=True,
            )


def compare_joint(paths: Sequence[Path], solver: str, limit: float) -> None:
    """Print a line for each variant of the joint program."""
    problems = [(path.stem, Problem.load(path)) for path in paths] or [("perceptron", perceptron_step())]
    for name, problem in problems:
        operators, arrays = len(problem.operators), len(problem.planned)
        print(
            f"{name} ({operators} operators, {arrays} planned arrays), {solver}, {limit:g} s: "
            "variables, constraints, seconds, status, buffer, bound (bytes)"
        )
        for variant, techniques in joint_variants():
            plan = joint_plan(problem, solver=solver, time_limit=limit, techniques=techniques)
            report = plan.provenance.place_solver
            print(
                f"| {variant} | {report.variables:,} | {report.constraints:,} | {report.seconds:.2f} "
                f"| {report.status.value} | {plan.buffer_bytes:,} | {report.bound_bytes} |",
                flush=True,
            )


def compare_rules(paths: Sequence[Path], limit: float) -> None:
    """Order all graphs, and print a line for each rule."""
    flows = [flow_of(Problem.load(path))[0] for path in paths]
    print(f"{len(flows)} graphs, {limit:g} s each: graphs left open, states expanded, processor seconds")
    variants = [("(nothing)", ALL_RULES)]
    variants += [(rule.name, replace(ALL_RULES, **{rule.name: False})) for rule in fields(SearchRules)]
    for name, rules in variants:
        left_open, expanded, start = 0, 0, time.process_time()
        for flow in flows:
            portfolio = Portfolio(flow, Patience.until(time.monotonic() + limit), rules)
            portfolio.run()
            left_open += portfolio.best.peak_bytes > portfolio.bound_bytes
            expanded += sum(part.search.expanded for part in portfolio.parts if part.search is not None)
        print(f"| {name} | {left_open} | {expanded:,} | {time.process_time() - start:.1f} |", flush=True)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.2f}"


def main() -> int:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("programs", "joint", "rules"))
    parser.add_argument("files", nargs="*", type=Path, help="graph files")
    parser.add_argument("--solver", default="highs", choices=backends.SOLVERS)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a graph and variant")
    parser.add_argument("--variants", nargs="+", default=(), help="of programs; such as all or literal")
    options = parser.parse_args()
    if options.what == "rules":
        compare_rules(options.files, options.time_limit)
    elif options.what == "joint":
        compare_joint(options.files, options.solver, options.time_limit)
    else:
        compare_programs(options.files, options.solver, options.time_limit, options.variants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
