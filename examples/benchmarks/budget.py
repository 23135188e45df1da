"""Plans steps within memory budgets: simulated extra time, beside the bound and other planners.

A budget is a share of the step's peak without repetitions, of the order that the project finds for it. All
planners get the same step, orders, seconds and evaluation, and what they find in the best order counts: ours,
those of Chen et al. and in the manner of ``torch.compile``'s memory budget
(``olla_solvers.recomputation.published``). Seconds are estimates for
``--device``; nothing runs. A cell is extra time in per cent of the step's; in brackets the peak in MiB where
the budget is not met.

    python examples/benchmarks/budget.py
    python examples/benchmarks/budget.py --models torchvision:resnet50 --batch-sizes 32 --shares 0.7 0.5
    python examples/benchmarks/budget.py --rewrites none --json budget.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ordering import TOKENS, table

from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.costs import profile_by_name
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.models import build_model, optimizer_by_name
from olla_fx.options import Options
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputation import RecomputableStep
from olla_fx.rewriting import Rewriting, choose_rewrites
from olla_solvers.recomputation.least_time import curve
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.activation_budget import dynamic_budget, greedy_budget
from olla_solvers.recomputation.published.methods import HEURISTICS

MIB = 1 << 20

LONG = ("convolution", "addmm", "mm", "bmm", "_scaled_dot_product", "mkldnn")
"""How the names of operators begin that ``torch.compile``'s budget repeats at a price, others first."""

HERE = Path(__file__).parent

STEPS = (
    ("torchvision:resnet50", 32),
    ("torchvision:vgg16", 32),
    ("torchvision:vit_b_16", 32),
    ("transformers:gpt2-base", 8),
    (f"{HERE / 'budget_models.py'}:u_net", 8),
    (f"{HERE / 'budget_models.py'}:llama", 4),
    (f"{HERE / 'budget_models.py'}:residual_network", 32),
    (f"{HERE / 'budget_models.py'}:unrolled_lstm", 64),
)

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

MOST_OPERATORS = 3000
"""Of a step that other planners get, too: some try so many plans that larger ones take minutes."""


def step_to_plan(name: str, batch: int, device: str, rewrites: str) -> tuple[RecomputationProblem, ...]:
    """Return what of a model's whole training step may run again, in the orders that a plan begins from."""
    case = build_model(name, batch_size=batch, tokens=512 if "gpt2" in name else TOKENS, device="meta")
    optimizer = optimizer_by_name("sgd", case.model.parameters())
    options = Options(rewrites=rewrites)
    request = StepRequest(case.model, case.inputs, Mode.TRAINING, case.loss_fn, optimizer, options)
    captured = capture(request)
    probe = Probe(captured.device, False, lambda _, ask: ask())
    rewriting = Rewriting(captured, GradientsInBuffer(), probe)
    candidate = choose_rewrites(rewriting, options.rewrites)
    return RecomputableStep.of(rewriting, candidate, profile_by_name(device)).orders()


def plans_of(
    problems: tuple[RecomputationProblem, ...], shares: list[float], planners: list[str]
) -> dict[str, Any]:
    """Return what each planner makes of each budget, and what is proven."""
    problem = problems[0]
    plain_bytes = curve(problem, (2**60,))[0].recomputation.peak_bytes
    budgets = [int(share * plain_bytes) for share in shares]
    began = time.process_time()
    # As long for each order as for a single one.
    answers = curve(problems, budgets, effort=len(problems))
    seconds = {"ours": time.process_time() - began}
    plans = {"ours": [answer.recomputation for answer in answers]}
    if len(problem.order) <= MOST_OPERATORS:
        for name in planners:
            began = time.process_time()
            plans[name] = [
                min((plan_by(name, each, budget) for each in problems), key=partial(rank, budget))
                for budget in budgets
            ]
            seconds[name] = time.process_time() - began
    step = problem.step_seconds
    return {
        "operators": len(problem.order),
        "peak_bytes": plain_bytes,
        "budgets": budgets,
        "bounds": [answer.bound.extra_seconds / step for answer in answers],
        "plans": {
            name: [[plan.extra_seconds / step, plan.peak_bytes] for plan in of_name]
            for name, of_name in plans.items()
        },
        "seconds": seconds,
    }


def rank(budget_bytes: int, plan: Recomputation) -> tuple[int, float]:
    """Return how far a plan is beyond a budget, and what it takes."""
    return max(0, plan.peak_bytes - budget_bytes), plan.extra_seconds


def plan_by(name: str, problem: RecomputationProblem, budget_bytes: int) -> Recomputation:
    """Return what another planner makes of a budget."""
    if not name.startswith("minimum-cut"):
        return HEURISTICS[name](problem, budget_bytes)
    planner = dynamic_budget if name.endswith("dynamic") else greedy_budget
    names = enumerate(operator.name for operator in problem.problem.operators)
    return planner(problem, budget_bytes, long=[index for index, name in names if name.startswith(LONG)])


def cell(extra: float, peak_bytes: int, budget_bytes: int) -> str:
    """Return a cell of the table."""
    return f"{extra:.2%}" if peak_bytes <= budget_bytes else f"({peak_bytes / MIB:,.0f})"


def tables(name: str, figures: dict[str, Any], shares: list[float]) -> str:
    """Return one step's table."""
    budgets = figures["budgets"]
    header = ("planner", *(f"{share:g}" for share in shares), "seconds")
    rows = [("budget, MiB", *(f"{budget / MIB:,.0f}" for budget in budgets), "")]
    rows.append(
        ("proven", *("impossible" if bound > 1e9 else f"{bound:.2%}" for bound in figures["bounds"]), "")
    )
    for planner, plans in figures["plans"].items():
        cells = (cell(*plan, budget) for plan, budget in zip(plans, budgets, strict=True))
        rows.append((planner, *cells, f"{figures['seconds'][planner]:.1f}"))
    title = (
        f"{Path(name).name}: {figures['operators']:,} operators, peak {figures['peak_bytes'] / MIB:,.0f} MiB"
    )
    return f"{title}\n{table(header, rows)}\n"


def main() -> int:
    """Plan what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(32,), metavar="N")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--planners", nargs="*", choices=HEURISTICS, default=list(HEURISTICS), metavar="NAME")
    parser.add_argument("--rewrites", choices=("all", "none"), default="all")
    parser.add_argument("--device", default="a100", help="whose time counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    steps = STEPS
    if options.models:
        steps = tuple((name, batch) for name in options.models for batch in options.batch_sizes)
    results = {}
    for name, batch in steps:
        problems = step_to_plan(name, batch, options.device, options.rewrites)
        results[f"{name} {batch}"] = plans_of(problems, list(options.shares), options.planners)
        print(tables(name, results[f"{name} {batch}"], list(options.shares)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
