"""Compares the simulated time of steps that swap with that of steps that ran, over a link slowed down.

    python examples/benchmarks/swapped_steps.py
    python examples/benchmarks/swapped_steps.py --models lstm --link 0.5 --rounds 9

Every array of a whole training step that is not used for a tenth of the step waits on the host. The link is
as fast as ``--link`` says, in GB/s each way, or has shares (``--shares``) of the speed at which all copies of
a direction take the operators' own time. Operators run one by one, by the clock; what they took in a step is
what that same step is simulated with, so that other programs on the machine lengthen both. Rows have the
medians of the rounds: the operators' own time, the copies of a direction one after the other, what the
simulator says of the step and what the step took with its waits, by how much they differ, and the round in
which they differ most.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.link import is_transfer, waits_for
from olla_fx.models.vision import import_torchvision
from olla_fx.report import format_table
from olla_fx.run import recording
from olla_fx.run.executor import Executor
from olla_fx.run.planned_run import PlannedRun
from olla_fx.swap_request import SwapProblem, SwapRequest
from olla_solvers.analysis import timesteps
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, Transfer

LEAST_GAP = 0.1
"""Share of a step's timesteps for which an array is not used, to wait on the host."""

Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


class LanguageModel(nn.Module):
    """A small transformer, or a recurrent network, over tokens."""

    def __init__(self, body: nn.Module, width: int) -> None:
        """Put an embedding in front of a body and a classifier behind it."""
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, width), body, nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last token."""
        answer = self.body(self.embedding(tokens))
        return self.head((answer[0] if isinstance(answer, tuple) else answer)[:, -1])


def mlp() -> Case:
    """Return eight wide layers."""
    layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 64)), (torch.randn(512, 512), torch.randint(64, (512,)))


def resnet18() -> Case:
    """Return ResNet-18 on small images."""
    model = import_torchvision().models.resnet18(num_classes=64)
    return model, (torch.randn(8, 3, 64, 64), torch.randint(64, (8,)))


def transformer() -> Case:
    """Return four encoder layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, F.gelu, batch_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return LanguageModel(body, 128), (torch.randint(64, (16, 64)), torch.randint(64, (16,)))


def lstm() -> Case:
    """Return two recurrent layers."""
    body = nn.LSTM(128, 128, 2, batch_first=True)
    return LanguageModel(body, 128), (torch.randint(64, (32, 64)), torch.randint(64, (32,)))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp, "resnet18": resnet18, "transformer": transformer, "lstm": lstm,
}  # fmt: skip


class Remembered:
    """Chooses transfers, and remembers them."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.transfers: Sequence[Transfer] = ()
        self.sizes: list[int] = []

    def __call__(self, stated: SwapProblem) -> Sequence[Transfer]:
        """Let arrays wait that are not used for long, each as long as it can but for the copies' time."""
        at, length = timesteps(stated.order), len(stated.order)
        transfers = []
        for index in sorted(stated.may_wait):
            array = stated.problem.arrays[index]
            uses = sorted({at[array.producer or 0], *(at[consumer] for consumer in array.consumers)})
            gaps = [(later - first, first, later) for first, later in itertools.pairwise(uses)]
            gap, first, later = max(gaps, default=(0, 0, 0))
            if gap >= max(4, LEAST_GAP * length):
                quarter = gap // 4
                transfers.append(Transfer(first, first + 1 + quarter, later - quarter, later, index))
        self.transfers = transfers
        self.sizes = [stated.problem.arrays[transfer.array].size_bytes for transfer in transfers]
        return transfers


def main() -> None:
    """Compare all models and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--link", type=float, help="GB/s each way (default: see --share)")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 1.0, 2.0],
        help="of the speed at which all copies of a direction take the step's own time",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="steps a figure (default 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = ("link GB/s", "transfers", "operators", "copies", "simulated", "executed", "difference", "at most")
    for name in arguments.models:
        rows = compare(name, arguments.link, arguments.shares, arguments.rounds)
        print(f"{name}\n{format_table([head, *rows])}\n", flush=True)


def compare(name: str, link: float | None, shares: Sequence[float], rounds: int) -> list[tuple[str, ...]]:
    """Return the rows of a model."""
    chosen = Remembered()
    step, batch = planned(name, SwapRequest(chosen, Link(math.inf, math.inf)))
    own = statistics.median(sum(run.operators) for run in timed_runs(step, batch, rounds))
    sizes = chosen.sizes
    speeds = [link * 1e9] if link else [share * sum(sizes) / own for share in shares]
    rows = []
    for speed in speeds:
        slow = Link(speed, speed)
        step, batch = planned(name, SwapRequest(chosen, slow))
        runs = timed_runs(step, batch, rounds)
        simulated = [simulate(run.operators, chosen.transfers, sizes, slow).seconds for run in runs]
        differences = [told / run.executed - 1 for told, run in zip(simulated, runs, strict=True)]
        rows.append(
            (
                f"{speed / 1e9:.3g}",
                f"{len(sizes):,}",
                milliseconds(sum(run.operators) for run in runs),
                milliseconds([sum(sizes) / speed]),
                milliseconds(simulated),
                milliseconds(run.executed for run in runs),
                f"{statistics.median(differences):+.1%}",
                f"{max(differences, key=abs):+.1%}",
            )
        )
    return rows


def milliseconds(seconds: Iterable[float]) -> str:
    """Return a median as text."""
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def planned(name: str, request: SwapRequest) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a model's step, which has run until its plan is settled, and its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = olla_fx.optimize(
        model, batch, loss_fn=F.cross_entropy, optimizer=optimizer, swap=request, recompute=0, solver="none"
    )
    for _ in range(4):
        step(*batch)
    return step, batch


@dataclass(frozen=True)
class TimedRun:
    """One step, whose operators ran one by one.

    Attributes:
        operators: seconds of each, in their order, without what waits for copies; what passes between
            operators, and what asks for copies, is spread over all.
        executed: seconds of the step.
    """

    operators: list[float]
    executed: float


class Clock:
    """Tells the time, and from when to when it was asked.

    Attributes:
        readings: all of them.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.readings: list[float] = []

    def __call__(self) -> float:
        """Return the time in seconds."""
        self.readings.append(time.perf_counter())
        return self.readings[-1]


def timed_runs(step: Any, batch: tuple[torch.Tensor, ...], rounds: int) -> list[TimedRun]:
    """Run steps whose operators are timed by the clock."""
    started: list[PlannedRun] = []
    start = Executor.start

    def start_timed(self: Executor, *arguments: Any) -> PlannedRun:
        run = start(self, *arguments)
        run.timed = True
        started.append(run)
        return run

    runs = []
    for _ in range(rounds):
        clock = Clock()
        with (
            mock.patch.object(Executor, "start", start_timed),
            mock.patch.object(recording, "usual_clock", return_value=clock),
        ):
            step(*batch)
        runs.append(timed_run(started.pop(), clock))
    return runs


def timed_run(run: PlannedRun, clock: Clock) -> TimedRun:
    """Return what a run's clock has shown."""
    nodes = {node.name: node for node in run.step.dataflow.operators}
    executed = clock.readings[-1] - clock.readings[0]
    computing = [at for at, name in enumerate(run.step.plan.order) if not is_transfer(nodes[name])]
    waiting = [at for at, name in enumerate(run.step.plan.order) if waits_for(nodes[name]) is not None]
    between = executed - sum(run.seconds[at] for at in (*computing, *waiting))
    operators = [run.seconds[at] + between / len(computing) for at in computing]
    return TimedRun(operators, executed)


if __name__ == "__main__":
    main()
