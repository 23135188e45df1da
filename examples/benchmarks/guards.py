"""Times the guards of a call: from the call of a planned step until its first operator would run.

    python examples/benchmarks/guards.py
    python examples/benchmarks/guards.py --models --rounds 1
    python examples/benchmarks/guards.py --against ../before --rounds 5

The call is stopped where the run would start, so the figure is what checking that the plan still fits and
gathering its inputs cost. ``--against`` names another checkout of the project, whose calls are timed in turn
with this one's, each in a process of its own. A figure is the median of the rounds' medians; in brackets is
the fastest call.

Rows "questions about" are a part of that: what a planned model of transformers asks
about its ``attention_mask`` at every call, on the zoo's small texts (``--masked`` names the models).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MODELS = ("torchvision:resnet50", "torchvision:mobilenet_v2", "transformers:bert")
STEPS = ("own loop", "sgd-momentum", "adamw")
MASKED = ("bert", "gpt2", "llama", "t5", "whisper")


def main() -> None:
    """Time every model and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--masked", nargs="*", default=list(MASKED), metavar="NAME", help="of the zoo's")
    parser.add_argument("--calls", type=int, default=200, help="timed calls a round (default 200)")
    parser.add_argument("--rounds", type=int, default=3, help="processes a checkout (default 3)")
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    parser.add_argument("--one-round", action="store_true", help="print one round's figures as JSON")
    arguments = parser.parse_args()
    if arguments.one_round:
        cases = [(name, step) for name in arguments.models for step in STEPS]
        rows = {f"{name}, {step}": measure(name, step, arguments.calls) for name, step in cases}
        for name in arguments.masked:
            for mask in ("ones", "right"):
                rows[f"questions about {name}'s mask, {mask}"] = measure_questions(
                    name, mask, arguments.calls
                )
        print(json.dumps(rows))
        return
    checkouts = [Path(__file__).parents[2], *([arguments.against] if arguments.against else [])]
    rounds: dict[Path, list[dict[str, list[float]]]] = {checkout: [] for checkout in checkouts}
    for _ in range(arguments.rounds):
        for checkout in checkouts:
            rounds[checkout].append(one_round(checkout, arguments))
    print(
        f"{'microseconds a call':<40}" + "".join(f"{checkout.resolve().name:>20}" for checkout in checkouts)
    )
    for row in rounds[checkouts[0]][0]:
        figures = [
            (
                statistics.median(times[row][0] for times in rounds[checkout]),
                min(times[row][1] for times in rounds[checkout]),
            )
            for checkout in checkouts
        ]
        print(f"{row:<40}" + "".join(f"{f'{median:.0f} [{least:.0f}]':>20}" for median, least in figures))


def one_round(checkout: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time every model with the packages of a checkout."""
    path = os.pathsep.join([str(checkout), str(checkout / "solvers")])
    command = [sys.executable, __file__, "--one-round", "--calls", str(arguments.calls)]
    run = subprocess.run(
        [*command, "--models", *arguments.models, "--masked", *arguments.masked],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    rows: dict[str, list[float]] = json.loads(run.stdout.splitlines()[-1])
    return rows


class Stopped(Exception):
    """Raised in the place of the run."""


def stop(executor: object, lease: Any) -> NoReturn:
    """Stop a call where its run would start."""
    if lease is not None:
        lease.release()
    raise Stopped


def measure(name: str, step: str, calls: int) -> tuple[float, float]:
    """Return the median and the least time of a call's guards, in microseconds."""
    import torch

    import olla_fx
    from olla_fx.models import build_model
    from olla_fx.models.optimizers import optimizer_by_name

    torch.set_num_threads(1)
    case = build_model(name, batch_size=2, image_size=64, tokens=16, train=True)
    *inputs, target = case.inputs
    if step == "own loop":
        planned = olla_fx.optimize(case.model, tuple(inputs), solver="none")
        for _ in range(3):
            case.loss_fn(planned(*inputs), target).backward()
    else:
        optimizer = optimizer_by_name(step, case.model.parameters(), lr=1e-4)
        planned = olla_fx.optimize(
            case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, solver="none"
        )
        inputs = list(case.inputs)
        for _ in range(3):
            planned(*inputs)
    times = []
    with stopped_calls():
        for _ in range(calls):
            started = time.perf_counter()
            try:
                planned(*inputs)
            except Stopped:
                times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[len(times) // 4 :]), min(times)


def measure_questions(name: str, mask: str, calls: int) -> tuple[float, float]:
    """Return the median and the least time of what a call asks about its mask, in microseconds.

    Raises:
        SystemExit: if it asks nothing.
    """
    import torch
    from zoo_transformers import transformers_case

    import olla_fx
    from olla_fx.guards import QuestionGuard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = transformers_case(name, mask)
    *inputs, target = case.inputs
    planned = olla_fx.optimize(case.model, tuple(inputs), solver="none")
    for _ in range(3):
        case.loss_fn(planned(*inputs), target).backward()
    first_other, times = QuestionGuard.first_other, []

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return first_other(*arguments)
        finally:
            times.append((time.perf_counter() - started) * 1e6)

    QuestionGuard.first_other = timed  # type: ignore[method-assign]
    try:
        with stopped_calls():
            for _ in range(calls):
                with contextlib.suppress(Stopped):
                    planned(*inputs)
    finally:
        QuestionGuard.first_other = first_other  # type: ignore[method-assign]
    if len(times) != calls:
        raise SystemExit(f"{name}: {len(times)} plans were asked in {calls} calls")
    return statistics.median(times[len(times) // 4 :]), min(times)


@contextlib.contextmanager
def stopped_calls() -> Iterator[None]:
    """Stop calls where their runs would start, while the context lasts."""
    from olla_fx.run.executor import Executor

    start = Executor.start
    Executor.start = stop  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Executor.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
