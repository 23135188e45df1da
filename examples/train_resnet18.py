"""Train ResNet-18 on handwritten digits twice, eagerly and in one planned buffer, and compare.

Both trainings start from the same weights and see the same batches. Each planned step (forward, loss,
backward, weight update) runs in one preallocated buffer. At the end a table says what both needed, and
whether every loss, weight, statistic and momentum is the same to the last bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import olla_fx
from olla_fx.eager.baseline import Baseline, dispatched_baseline, record_baseline
from olla_fx.errors import ArenaUnavailableError
from olla_fx.models import import_torchvision
from olla_fx.report import format_bytes, format_table

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """A model with what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def new_training() -> Training:
    """Make the same weights every time; SGD with momentum, and a learning rate that falls."""
    torch.manual_seed(0)
    model = import_torchvision().models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5))


def eager_step(training: Training) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the step as one writes it in PyTorch."""

    def step(images, labels):
        loss = F.cross_entropy(training.model(images), labels)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


def digit_batches(steps: int, batch_size: int) -> list[Batch]:
    """Return batches of real images, 8x8 in scikit-learn, scaled up to 3x64x64."""
    digits = load_digits()
    chosen = torch.arange(steps * batch_size) % len(digits.target)
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[chosen, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)[chosen]
    large = (F.interpolate(part, 64, mode="bilinear") for part in images.split(batch_size))
    return list(zip(large, labels.split(batch_size), strict=True))


def measure_eager(batch: Batch) -> Baseline:
    """Measure what PyTorch's own allocator holds during a step; the second, which has momentum."""
    step = eager_step(new_training())
    step(*batch)
    try:
        return record_baseline(lambda: step(*batch))
    except ArenaUnavailableError:  # no C++ compiler: followed under the dispatcher only
        return dispatched_baseline(lambda: step(*batch))


def bits_of(training: Training, losses: list[torch.Tensor]) -> list[bytes]:
    """Return the bits of every loss, parameter, buffer and tensor of optimizer state."""
    states = training.optimizer.state.values()
    momentum = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [
        tensor.numpy().tobytes() for tensor in (*losses, *training.model.state_dict().values(), *momentum)
    ]


def timed(step: Callable[..., torch.Tensor], batch: Batch) -> tuple[torch.Tensor, float]:
    """Run a step; return its loss and its seconds."""
    started = time.perf_counter()
    loss = step(*batch)
    return loss, time.perf_counter() - started


def main() -> int:
    """Train, compare, print; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--steps", 10), ("--batch-size", 32), ("--threads", torch.get_num_threads())):
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    if min(options.steps, options.batch_size, options.threads) < 1:
        parser.error("every option must be at least 1")
    torch.set_num_threads(options.threads)
    batches = digit_batches(options.steps, options.batch_size)

    eager, planned = new_training(), new_training()
    run_planned = olla_fx.optimize(
        planned.model, batches[0], loss_fn=F.cross_entropy, optimizer=planned.optimizer
    )
    steps = {"eager": eager_step(eager), "planned": run_planned}
    losses, seconds = {name: [] for name in steps}, {name: [] for name in steps}
    for number, batch in enumerate(batches, 1):
        for name in sorted(steps, reverse=number % 2 == 0):  # side by side, taking turns at going first
            loss, spent = timed(steps[name], batch)
            losses[name].append(loss)
            seconds[name].append(spent)
        eager.scheduler.step()
        planned.scheduler.step()
        both = ", ".join(f"{values[-1]:.6f} {name}" for name, values in losses.items())
        print(f"step {number:>2}: loss {both}")

    same = bits_of(eager, losses["eager"]) == bits_of(planned, losses["planned"])
    plan, counts, baseline = run_planned.plan, run_planned.stats.counts, measure_eager(batches[0])
    # The first planned call records the step and plans again, the second touches a new buffer.
    usual = {name: times[2:] or times for name, times in seconds.items()}
    ratios = [b / a for a, b in zip(usual["eager"], usual["planned"], strict=True)]
    rows = [
        (f"eager peak, {baseline.source}", format_bytes(baseline.live_peak_bytes)),
        ("caching allocator, reserved (model)", format_bytes(baseline.reserved_bytes)),
        ("caching allocator, fragmentation (model)", f"{baseline.fragmentation:.2%}"),
        ("planned peak", format_bytes(plan.peak_bytes)),
        ("buffer", format_bytes(plan.buffer_bytes)),
        ("lower bound", format_bytes(plan.lower_bound_bytes)),
        ("fragmentation", f"{plan.fragmentation:.2%}"),
        ("arrays live in", run_planned.stats.binding.value),
        ("requests served in the buffer", f"{counts.served:,}"),
        ("requests served outside: outputs", f"{counts.outputs:,}"),
        ("requests served outside: others", f"{counts.outside:,}"),
        ("requests on worker threads", f"{counts.requests_on_worker_threads:,}"),
        *((f"seconds, {stage}", f"{spent:.3f}") for stage, spent in plan.timings.items()),
        *((f"seconds a step, {name} (median)", f"{median(times):.4f}") for name, times in usual.items()),
        ("planned / eager (median of pairs)", f"{median(ratios):.3f}"),
        ("losses and weights identical", "yes" if same else "no"),
    ]
    print(f"\nResNet-18, batch {options.batch_size}, 3x64x64, {options.threads} threads")
    print(format_table(rows))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
