"""Redoes Figure 5 of "GPU Memory Management for Neural Networks using Deep Q-Network" in the simulator.

Extra time against the reduction of the peak of planned arrays and workspaces, for the DQN planner
(``olla_fx.deep_q``), the same with swapping alone, the same number of games played at random, Chen et al.'s
planner (the paper's MXNet-memonger) and others. All get the same step in the same order, the same seconds
(estimates for ``--device``) and link, and are counted by the same simulator. Nothing runs.

    python examples/benchmarks/dqn.py --json dqn.json --plot docs/dqn.png
    python examples/benchmarks/dqn.py --json dqn.json --parts --plot docs/dqn.png

The second one measures nothing. Plans are as good as what was learned until the time limit, so they depend on
the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kept_figures
import torch
from budget_steps import step_to_plan
from budget_tables import in_markdown
from kmeans import kmeans_problem
from swapping_planners import AUTOSWAP_SCORES, SwappableStep

from olla_fx.costs import profile_by_name
from olla_fx.deep_q import QNetwork, Settings, learn, plan_by_learning
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.recomputation.published.methods import HEURISTICS
from olla_solvers.swapping.environment.environment import Environment
from olla_solvers.swapping.transfers import Link

HERE = Path(__file__).parent

CIFAR = HERE / "paper_figures" / "models" / "cifar.py"

MODELS = {
    "resnet18": (f"{CIFAR}:resnet18", 100),
    "resnet50": (f"{CIFAR}:resnet50", 100),
    "vgg11": (f"{CIFAR}:vgg11", 100),
    "vgg16": (f"{CIFAR}:vgg16", 100),
    "u_net": (f"{HERE / 'budget_models.py'}:u_net", 8),
    "lstm": (f"{HERE / 'dqn_models.py'}:char_rnn", 64),
    "sd_resnet34": (f"{HERE / 'dqn_models.py'}:stochastic_resnet34", 100),
    "kmeans": ("", 0),
}
"""Names and batch sizes."""

SHARES = (0.8, 0.7, 0.6, 0.5)
"""Of the peak."""

CHEN = ("chen-search", "chen-segments", "chen-segments-by-cost")

SWAPPING = {
    "AutoSwap": AUTOSWAP_SCORES,
    "LRU": ("least-recently-used",),
    "longest reused": ("longest-reused",),
}
"""Published planners that swap, each with the methods of which the best counts, AutoSwap by each of its
scores. The last two are the paper's SuperNeurons and TFLMS."""

PARTS = ("learned", "swapping", "transfer")

TRANSFERS = (("resnet18", "resnet50"), ("vgg11", "vgg16"))

TRANSFER_SHARE = 0.7

Figures = dict[str, Any]

Point = tuple[float, float] | None
"""Peak as a share of the plain one, and extra time as a share of the step; None if a limit is not met."""


def problem_of(name: str, device: str) -> RecomputationProblem:
    """Return a model's step, or k-means."""
    model, batch = MODELS[name]
    if name == "kmeans":
        return kmeans_problem(profile_by_name(device))
    return step_to_plan(model, batch, device, "none").problems[0]


def measure(problem: RecomputationProblem, link: Link, seconds: float) -> Figures:
    """Return the plans of all planners for each share."""
    peak = Environment(problem, 0, link).peak_bytes
    points: dict[str, list[Point]] = {}
    games = []
    for share in SHARES:
        limit = int(share * peak)

        def put(planner: str, peak_bytes: int, extra: float, limit: int = limit) -> None:
            point = (peak_bytes / peak, extra / problem.step_seconds) if peak_bytes <= limit else None
            points.setdefault(planner, []).append(point)

        for planner, recompute in (("DQN", True), ("DQN, swap only", False)):
            learned = plan_by_learning(problem, limit, link, recompute=recompute, time_limit=seconds)
            put(planner, learned.plan.peak_bytes, learned.plan.extra_seconds)
            games.append(len(learned.returns))
            put(f"{planner}, at random", *_at_random(problem, limit, link, recompute, games[-1]))
        chen = [HEURISTICS[method](problem, limit) for method in CHEN]
        best = min(chen, key=lambda plan: (max(plan.peak_bytes, limit), plan.extra_seconds))
        put("Chen", best.peak_bytes, best.extra_seconds)
    return {
        "operators": len(problem.order),
        "peak_bytes": peak,
        "step_seconds": problem.step_seconds,
        "games": games,
        "points": points,
    }


def _at_random(
    problem: RecomputationProblem, limit: int, link: Link, recompute: bool, games: int
) -> tuple[int, float]:
    """Return peak and extra seconds of the best of some games without learning."""
    environment, draw = Environment(problem, limit, link, recompute=recompute), random.Random(0)
    best = (environment.peak_bytes, float("inf"))
    for _ in range(games):
        observation = environment.reset()
        while not observation.is_over:
            observation, _ = environment.step(draw.choice(observation.choices))
        if environment.is_won and environment.extra_seconds < best[1]:
            best = (environment.plan().peak_bytes, environment.extra_seconds)
    return best


def by_swapping(problem: RecomputationProblem, link: Link) -> dict[str, list[Point]]:
    """Return the plans of published planners that swap."""
    swappable = SwappableStep.of(problem)
    peak_bytes = swappable.peak_bytes

    def point(methods: Sequence[str], limit_bytes: int) -> Point:
        plan = swappable.plan(methods, limit_bytes, link)
        return None if plan is None else (plan[0] / peak_bytes, plan[1] / problem.step_seconds)

    return {
        planner: [point(methods, int(share * peak_bytes)) for share in SHARES]
        for planner, methods in SWAPPING.items()
    }


def transferred(
    small: RecomputationProblem, large: RecomputationProblem, link: Link, seconds: float
) -> Figures:
    """Return the extra time of the large step's plans, by what was learned on the small one and without."""
    teacher = Environment(small, 0, link)
    limit = int(TRANSFER_SHARE * teacher.peak_bytes)
    network = learn([Environment(small, limit, link)], deadline=time.monotonic() + seconds).network
    limit = int(TRANSFER_SHARE * Environment(large, 0, link).peak_bytes)
    once = Settings(episodes=1, random_games=0, updates=0)

    def share(**named: Any) -> float | None:
        learned = plan_by_learning(large, limit, link, **named)
        return learned.plan.extra_seconds / large.step_seconds if learned.is_met else None

    untaught = [share(settings=once, network=QNetwork(seed=seed)) for seed in range(5)]
    return {
        "untaught": untaught,
        "as it is": share(settings=once, network=network),
        "tuned": share(network=network, time_limit=seconds),
        "learned anew": share(time_limit=seconds),
    }


def tables(results: Mapping[str, Figures]) -> str:
    """Return all figures in Markdown."""
    rows = []
    for name, known in results.items():
        for planner, points in known.get("points", {}).items():
            cells = ["-" if point is None else _percent(point[1]) for point in points]
            rows.append((name, planner, *cells))
    header = ("model", "extra time, %, at", *(f"-{100 * (1 - share):.0f} %" for share in SHARES))
    moved = [
        (name, *(_shown(known[key]) for key in ("untaught", "as it is", "tuned", "learned anew")))
        for name, known in results.get("transfers", {}).items()
    ]
    moved_header = (
        "from, to",
        "untaught (median of 5)",
        "learned on the small one",
        "and tuned",
        "learned anew",
    )
    games = [
        (
            name,
            f"{known['operators']}",
            f"{known['peak_bytes'] / 2**20:.0f}",
            f"{1e3 * known['step_seconds']:.1f}",
            f"{min(known['games'])} to {max(known['games'])}",
        )
        for name, known in results.items()
        if "games" in known
    ]
    game_header = ("model", "operators", "peak, MiB", "step, ms", "games in the time limit")
    return "\n\n".join(
        [in_markdown(header, rows), in_markdown(moved_header, moved), in_markdown(game_header, games)]
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        met = sorted(float("inf") if extra_time is None else extra_time for extra_time in value)
        value = met[len(met) // 2]
    return "-" if value is None or value == float("inf") else _percent(value)


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # without the sign of -0.0


def plot(results: Mapping[str, Figures], path: Path) -> None:
    """Draw extra time against the reduction, a picture for each model."""
    from matplotlib import pyplot

    shown = [(name, known["points"]) for name, known in results.items() if "points" in known]
    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7.5), squeeze=False, layout="constrained")
    labels: dict[str, Any] = {}
    for axis, (name, planners) in zip(axes.flat, shown, strict=False):
        for planner, points in planners.items():
            met = [point for point in points if point is not None]
            style = ":" if planner.endswith("random") else ".-"
            axis.plot([100 * (1 - x) for x, _ in met], [100 * y for _, y in met], style, label=planner)
        axis.set_title(name)
        axis.set_xlabel("memory reduction, %")
        axis.set_ylabel("extra time, %")
        labels |= {line.get_label(): line for line in axis.lines}
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--device", default="gtx1080ti", help="whose time counts (default: %(default)s)")
    parser.add_argument(
        "--link", type=float, default=16.0, metavar="GB/S", help="each way (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="time limit of a plan (default: %(default)s)"
    )
    kept_figures.add_options(parser)
    return parser.parse_args()


def main() -> int:
    """Plan what the command line asks for, and show all that is known."""
    options = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    link = Link(options.link * 1e9, options.link * 1e9)
    results = kept_figures.read(options.json)

    def keep() -> None:
        kept_figures.keep(options.json, results)

    for name in options.models:
        problem = problem_of(name, options.device)
        if "learned" in options.parts:
            results[name] = measure(problem, link, options.seconds)
            keep()
        if "swapping" in options.parts:
            results.setdefault(name, {"points": {}})["points"] |= by_swapping(problem, link)
            keep()
        print(name, file=sys.stderr)
    for small, large in TRANSFERS if "transfer" in options.parts else ():
        steps = [problem_of(name, options.device) for name in (small, large)]
        figures = transferred(*steps, link, options.seconds)
        results.setdefault("transfers", {})[f"{small}, {large}"] = figures
        keep()
    print(tables(results))
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
