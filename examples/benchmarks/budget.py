"""Plans steps within memory budgets: simulated extra time against memory, the bound, and other planners.

All planners get the same steps, orders, seconds and evaluation: ours, those of Chen et al. and in the manner
of ``torch.compile`` (``olla_solvers.recomputation.published``), ``torch.compile``'s own partitioner
(``budget_pytorch.py``) and ``torch.utils.checkpoint`` around blocks (``budget_steps.py``). Seconds are
estimates for ``--device``; nothing runs (``budget_measured.py`` runs steps). With rewrites, ours are compared
with checkpoints alone.

Figures are kept in a file, and parts of them can be made anew; tables and plot are of that file:

    python examples/benchmarks/budget.py --json budget.json --plot docs/budget.png
    python examples/benchmarks/budget.py --json budget.json --parts ours --models vgg16
    python examples/benchmarks/budget.py --json budget.json --parts --plot docs/budget.png

The last one measures nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import kept_figures
import torch
from budget_pytorch import points_by_pytorch
from budget_steps import STEPS, Step, checkpointed_step, short, step_to_plan
from budget_swapping import by_swapping, processor_seconds, swapping_tables
from budget_tables import LIMITS, SHARES, compared, of_experiments, plot, tables

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.least_time import WithinBudget, curve
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.activation_budget import dynamic_budget, greedy_budget
from olla_solvers.recomputation.published.methods import HEURISTICS

PARTS = ("published", "pytorch", "blocks", "ours", "swapping")

LINKS = (16, 32, 64)
"""GB/s each way."""

LONG = ("convolution", "addmm", "mm", "bmm", "_scaled_dot_product", "mkldnn")
"""How the names of operators begin that ``torch.compile``'s budget repeats at a price, others first."""

PYTORCH_BUDGETS = tuple(step / 20 for step in range(21))

MOST_OPERATORS = 3000
"""Of a step that all other planners get: on larger ones those below take many minutes. There, others have one
order, and fewer of PyTorch's budgets are tried, and of ours."""

SLOW = ("chen-segments-by-cost", "chen-recursive", "minimum-cut-dynamic", "minimum-cut-greedy")

EFFORT, LAST_EFFORT = 1.0, 4.0
"""Of our planner; the second, for shares of the peak and the lowest, is what plans take at last."""

ROUNDS = 4
"""How often budgets are added between the last plan within a limit of time and the first beyond it."""

LOWEST_STEPS = 3
"""Budgets between the lowest peak and what is proven impossible."""


def measure(name: str, batch: int, options: argparse.Namespace, rewrites: str, known: dict[str, Any]) -> None:
    """Put what is asked for of one step into what is known of it."""
    began = processor_seconds()
    step = step_to_plan(name, batch, options.device, rewrites)
    seconds = known.setdefault("seconds", {})
    seconds["capture"] = processor_seconds() - began
    known["operators"] = len(step.problems[0].order)
    plain = curve(step.problems, (2**60,))[0].recomputation.peak_bytes
    known["peak_bytes"] = plain
    is_small = known["operators"] <= MOST_OPERATORS
    makers: dict[str, Callable[[], Any]] = {
        "published": lambda: by_published(step.problems if is_small else step.problems[:1], plain, is_small),
        "pytorch": lambda: by_pytorch(step, PYTORCH_BUDGETS if is_small else PYTORCH_BUDGETS[::6]),
        "blocks": lambda: by_blocks(step, name, batch, options.device, rewrites),
        "ours": lambda: by_ours(
            step.problems,
            plain,
            [*(point[0] for point in compared(known)), *of_experiments(short(name), batch, rewrites)],
            ROUNDS if is_small else 2,
        ),
        "swapping": lambda: (
            known.get("swapping", {}) | by_swapping(step.problems, plain, options.links, options.seconds)
        ),
    }
    parts = set(options.parts)
    if rewrites != "none":
        parts -= {"published", "pytorch", "swapping"}
    for part in PARTS:
        if part in parts:
            began = processor_seconds()
            known[part] = makers[part]()
            seconds[part] = processor_seconds() - began


def by_ours(
    problems: Sequence[RecomputationProblem], plain: Bytes, others: Sequence[Bytes], rounds: int
) -> list[list[Any]]:
    """Return budget, peak, extra time and bound of our plans, at others' memory and about limits of time."""
    answers: dict[Bytes, WithinBudget] = {}
    step_seconds = problems[0].step_seconds

    def ask(budgets: Sequence[Bytes], effort: float) -> None:
        new = sorted(set(budgets) - set(answers))
        answers.update(zip(new, curve(problems, new, effort=effort), strict=True))

    ask([int(share * plain) for share in SHARES], LAST_EFFORT)
    ask(others, EFFORT)
    for _ in range(rounds):
        limits = [budget for limit in LIMITS for budget in between(answers, limit * step_seconds, plain)]
        ask(limits, EFFORT)
    lowest = min(answer.recomputation.peak_bytes for answer in answers.values())
    room = lowest - max(answer.bound.least_bytes for answer in answers.values())
    ask(
        [lowest - room * step // (LOWEST_STEPS + 1) for step in range(1, LOWEST_STEPS + 1)]
        if room > 0
        else [],
        LAST_EFFORT,
    )
    return [
        [
            budget,
            answer.recomputation.peak_bytes,
            answer.recomputation.extra_seconds / step_seconds,
            None if answer.bound.is_impossible else answer.bound.extra_seconds / step_seconds,
            answer.bound.least_bytes,
        ]
        for budget, answer in sorted(answers.items())
    ]


def between(answers: dict[Bytes, WithinBudget], most_seconds: float, plain: Bytes) -> list[Bytes]:
    """Return a budget where the straight line between the plans about a limit of time meets it."""
    plans = sorted((answer.recomputation for answer in answers.values()), key=lambda plan: plan.peak_bytes)
    within = [plan for plan in plans if plan.extra_seconds <= most_seconds]
    beyond = [plan for plan in plans if plan.extra_seconds > most_seconds]
    if not beyond:
        return []
    high, low = (within[0].peak_bytes, within[0].extra_seconds) if within else (plain, 0.0), beyond[-1]
    share = (most_seconds - high[1]) / (low.extra_seconds - high[1])
    budget = high[0] - int(share * (high[0] - low.peak_bytes))
    margin = (high[0] - low.peak_bytes) // 10
    return [min(max(budget, low.peak_bytes + margin), high[0] - margin)] if margin > 0 else []


def by_published(
    problems: Sequence[RecomputationProblem], plain: Bytes, is_small: bool
) -> dict[str, list[list[float]]]:
    """Return peak and extra time of each published planner's plan for each share, in its better order."""
    step_seconds = problems[0].step_seconds
    plans: dict[str, list[list[float]]] = {}
    for name in HEURISTICS if is_small else sorted(HEURISTICS.keys() - SLOW):
        for budget in (int(share * plain) for share in SHARES):
            plans_of_orders = [plan_by(name, problem, budget) for problem in problems]
            best = min(plans_of_orders, key=lambda plan: (max(plan.peak_bytes, budget), plan.extra_seconds))
            plans.setdefault(name, []).append([best.peak_bytes, best.extra_seconds / step_seconds])
    return plans


def plan_by(name: str, problem: RecomputationProblem, budget_bytes: int) -> Recomputation:
    """Return what another planner makes of a budget."""
    if not name.startswith("minimum-cut"):
        return HEURISTICS[name](problem, budget_bytes)
    planner = dynamic_budget if name.endswith("dynamic") else greedy_budget
    names = enumerate(operator.name for operator in problem.problem.operators)
    return planner(problem, budget_bytes, long=[index for index, name in names if name.startswith(LONG)])


def by_pytorch(step: Step, budgets: Sequence[float]) -> dict[str, Any]:
    """Return memory and extra time of the plans of PyTorch's partitioner, by its knapsacks."""
    graph, dataflow = step.captured.graph_module, step.recomputable.kept.dataflow
    return points_by_pytorch(graph, dataflow, step.problems, budgets)


def by_blocks(step: Step, name: str, batch: int, device: str, rewrites: str) -> list[float] | None:
    """Return memory and extra time of the step with checkpoints around blocks, and how many there are."""
    blocked = checkpointed_step(name, batch, device, rewrites)
    if blocked is None:
        return None
    checkpointed, blocks = blocked
    seconds = checkpointed.problems[0].step_seconds
    return [checkpointed.peak_bytes, seconds / step.problems[0].step_seconds - 1, blocks]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [short(name) for name, *_ in STEPS]
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--rewrites", nargs="+", choices=("all", "none"), help="for all steps")
    parser.add_argument("--device", default="a100", help="whose time counts (default: %(default)s)")
    parser.add_argument("--links", nargs="+", type=float, default=LINKS, metavar="GB/S")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="time limit of a plan of DQN's (default: %(default)s)"
    )
    kept_figures.add_options(parser)
    return parser.parse_args()


def main() -> int:
    """Plan what the command line asks for, and show all that is known."""
    options = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    steps = [step for step in STEPS if not options.models or short(step[0]) in options.models]
    results = kept_figures.read(options.json)
    for name, batch, usual in steps if options.parts else ():
        for rewrites in options.rewrites or usual:
            key = f"{short(name)} {batch} {rewrites}"
            measure(name, batch, options, rewrites, results.setdefault(key, {}))
            print(key, results[key]["seconds"], file=sys.stderr)
            kept_figures.keep(options.json, results)
    print(tables(results))
    print(f"\n{swapping_tables(results)}")
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
