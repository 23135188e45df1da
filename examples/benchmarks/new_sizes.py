"""Times what a new size costs a loop whose sizes vary: processor time, in milliseconds.

    python examples/benchmarks/new_sizes.py
    python examples/benchmarks/new_sizes.py --cases "encoder, AdamW" --sizes 40 --json new_sizes.json

Small encoders of words and a network of convolutions run at changing lengths, batches and image sizes, in a
loop of their own and as whole steps with AdamW, until one plan serves all sizes and what its operators
request was recorded. Then each size is new once. Three figures are medians over the sizes: placing arrays and
workspaces, with the check of the result; all of planning; and all that the first call takes beyond the
second and third with the same inputs. ``buffer / peak`` is the mean over the sizes, and the largest. Nothing
may be captured, and nothing be requested beyond what was planned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loop_cases.models import ConvNet, Encoder, word_loss
from torch import nn

import olla_fx
from olla_fx.run.families import FamilyPlans
from olla_solvers.resizing import KeptOrder

LEARNING_RATE = 1e-3
MOST_WARM_UPS = 24
ENOUGH_WARM_UPS = 3
KNOWN_CALLS = 2
WORDS = 1000


@dataclass(frozen=True)
class Case:
    """A loop whose sizes vary.

    Attributes:
        make: makes the model.
        loss_fn: of outputs and target.
        batch: makes a batch of a size that is drawn, the target last.
        is_whole: True for whole steps with AdamW, False for a loop of the caller's own.
    """

    make: Callable[[], nn.Module]
    loss_fn: Callable[..., torch.Tensor]
    batch: Callable[[random.Random], tuple[torch.Tensor, ...]]
    is_whole: bool


@dataclass
class Row:
    """What new sizes cost one loop; times are medians.

    Attributes:
        name: of the case.
        operators: of its step.
        arrays: in the buffer.
        workspaces: operators that have one.
        sizes: that were new.
        recorded_again: new sizes beside these of which operators requested more than was predicted.
        placing_ms: of placing arrays and workspaces, and checking the result.
        planning_ms: of all that is prepared before the run.
        call_ms: of the first call beyond later ones.
        known_call_ms: of later calls.
        buffer_bytes: of all sizes together.
        mean_ratio: buffer by peak.
        largest_ratio: likewise.
    """

    name: str
    operators: int
    arrays: int
    workspaces: int
    sizes: int
    recorded_again: int
    placing_ms: float
    planning_ms: float
    call_ms: float
    known_call_ms: float
    buffer_bytes: int
    mean_ratio: float
    largest_ratio: float


def texts(draw: random.Random) -> tuple[torch.Tensor, ...]:
    """Return two texts of 8 to 80 words, and a label for each word."""
    length = draw.randint(8, 80)
    return torch.randint(WORDS, (2, length)), torch.randint(WORDS, (2, length))


def batches_of_texts(draw: random.Random) -> tuple[torch.Tensor, ...]:
    """Return 2 to 8 texts of 8 to 40 words, and a label for each word."""
    shape = draw.randint(2, 8), draw.randint(8, 40)
    return torch.randint(WORDS, shape), torch.randint(WORDS, shape)


def images(draw: random.Random) -> tuple[torch.Tensor, ...]:
    """Return 2 to 6 images of 16 to 40 pixels, even."""
    batch, pixels = draw.randint(2, 6), 2 * draw.randint(8, 20)
    return torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))


def _encoder(layers: int) -> nn.Module:
    return Encoder(width=32, layers=layers)


CASES = {
    "encoder, own loop": Case(lambda: _encoder(11), word_loss, texts, is_whole=False),
    "encoder, AdamW": Case(lambda: _encoder(4), word_loss, texts, is_whole=True),
    "encoder of batches and lengths": Case(lambda: _encoder(4), word_loss, batches_of_texts, is_whole=True),
    "convolutions, AdamW": Case(ConvNet, F.cross_entropy, images, is_whole=True),
    "deep encoder, AdamW": Case(lambda: _encoder(16), word_loss, texts, is_whole=True),
}


class Clock:
    """Adds up the processor time of a method, call by call."""

    def __init__(self, owner: type, name: str) -> None:
        """Time a method of a class from now on."""
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds.append(time.thread_time() - started)

        setattr(owner, name, timed)

    @property
    def count(self) -> int:
        """The calls since its time was last taken."""
        return len(self.seconds)

    def take(self) -> float:
        """Return the time since it was last taken, in milliseconds."""
        total = 1e3 * sum(self.seconds)
        self.seconds.clear()
        return total


def calls_of(case: Case, step: Any, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    """Return a function of a batch that runs one step of a loop."""

    def own(*batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        case.loss_fn(step(*batch[:-1]), batch[-1]).backward()  # type: ignore[no-untyped-call]

    return step if case.is_whole else own


def new_batches(case: Case) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield batches of a case, no two of the same sizes."""
    draw, seen = random.Random(0), set()
    while True:
        batch = case.batch(draw)
        sizes = tuple(tensor.shape for tensor in batch)
        if sizes not in seen:
            seen.add(sizes)
            yield batch


def measure(name: str, sizes: int, placing: Clock, planning: Clock) -> Row:
    """Run one case.

    Args:
        name: a key of :data:`CASES`.
        sizes: how many to time.
        placing: the clock of placing.
        planning: the clock of planning.

    Raises:
        SystemExit: if a new size was captured, or something was not planned.
    """
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = new_batches(case)
    first = next(batches)
    if case.is_whole:
        step = olla_fx.optimize(model, first, loss_fn=case.loss_fn, optimizer=optimizer)
    else:
        step = olla_fx.optimize(model, first[:-1])
    call = calls_of(case, step, optimizer)
    _warm_up(call, batches, placing)
    times: list[tuple[float, float, float, float]] = []
    ratios: list[float] = []
    buffer_bytes, recorded_again = 0, 0
    while len(times) < sizes:
        batch = next(batches)
        placing.take(), planning.take()
        seconds = []
        for _ in range(1 + KNOWN_CALLS):
            started = time.thread_time()
            call(*batch)
            seconds.append(1e3 * (time.thread_time() - started))
        if step.stats.counts.outside or step.stats.binding != "buffer":
            raise SystemExit(f"{name}: {step.stats.counts.outside} requests were not planned")
        if not placing.count:
            raise SystemExit(f"{name}: a new size was not placed, but captured or run in eager")
        if placing.count > 1:
            recorded_again += 1
            continue
        later = statistics.mean(seconds[1:])
        times.append((placing.take(), planning.take(), seconds[0] - later, later))
        ratios.append(step.plan.buffer_bytes / step.plan.peak_bytes)
        buffer_bytes += step.plan.buffer_bytes
    problem = step.plan.problem
    workspaces = sum(1 for operator in problem.operators if operator.workspace_bytes)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return Row(
        name, len(problem.operators), len(problem.planned), workspaces, sizes, recorded_again, *medians,
        buffer_bytes, statistics.mean(ratios), max(ratios),
    )  # fmt: skip


def _warm_up(call: Callable[..., None], batches: Iterator[tuple[torch.Tensor, ...]], placing: Clock) -> None:
    """Run new sizes until several in a row were placed at once, and nothing was recorded of them."""
    in_a_row = 0
    for batch in itertools.islice(batches, MOST_WARM_UPS):
        placing.take()
        for _ in range(1 + KNOWN_CALLS):
            call(*batch)
        in_a_row = in_a_row + 1 if placing.count == 1 else 0
        if in_a_row == ENOUGH_WARM_UPS:
            return
    raise SystemExit(f"after {MOST_WARM_UPS} sizes new ones were still captured or recorded")


def main() -> int:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--sizes", type=int, default=20, help="that are timed (default 20)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    placing, planning = Clock(KeptOrder, "plan"), Clock(FamilyPlans, "at")
    rows: list[Row] = []
    print(
        "| loop | operators | arrays, workspaces | placing ms | planning ms | new size ms | known size ms "
        "| recorded again | buffers MiB | buffer / peak |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.cases:
        row = measure(name, arguments.sizes, placing, planning)
        rows.append(row)
        print(
            f"| {row.name} | {row.operators:,} | {row.arrays:,}, {row.workspaces:,} | {row.placing_ms:.1f} "
            f"| {row.planning_ms:.1f} | {row.call_ms:.1f} | {row.known_call_ms:.1f} | {row.recorded_again} "
            f"| {row.buffer_bytes / 2**20:.1f} | {row.mean_ratio:.4f}, {row.largest_ratio:.4f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
