"""Makes the steps of the memory budgets' benchmark: captured, in the project's orders, with seconds.

``checkpointed_step`` is the same model's with ``torch.utils.checkpoint`` around its blocks, as people do it
by hand. Blocks are the outermost members of a ``Sequential`` or ``ModuleList`` that have parts themselves.
Where there are none, a ``Sequential`` is cut into as many pieces as each then has members.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ordering import TOKENS
from torch import nn
from torch.utils.checkpoint import checkpoint

from olla_fx.capture import CapturedStep, Mode, StepRequest, capture
from olla_fx.costs import DeviceProfile, profile_by_name
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.models import ModelCase, build_model, optimizer_by_name
from olla_fx.options import Options
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputation import RecomputableStep
from olla_fx.rewriting import Rewriting, choose_rewrites
from olla_solvers.recomputation.problem import RecomputationProblem

HERE = Path(__file__).parent

EITHER = ("none", "all")

STEPS = (
    ("torchvision:resnet50", 32, EITHER),
    ("torchvision:vgg16", 32, EITHER),
    ("torchvision:vit_b_16", 32, EITHER),
    (f"{HERE / 'budget_models.py'}:gpt2", 8, EITHER),
    (f"{HERE / 'budget_models.py'}:u_net", 8, EITHER),
    (f"{HERE / 'budget_models.py'}:llama", 4, EITHER),
    (f"{HERE / 'budget_models.py'}:residual_network", 32, ("none",)),
    (f"{HERE / 'budget_models.py'}:unrolled_lstm", 64, ("none",)),
)
"""Models with their batch sizes, and which rewrites they are planned with."""


def short(name: str) -> str:
    """Return a model's name without where it is from."""
    return name.rpartition(":")[2]


@dataclass(frozen=True)
class Step:
    """A whole training step with SGD.

    Attributes:
        captured: its functional graph.
        recomputable: what of it may run again, after the rewrites that pay.
        problems: the same in each of the orders that a memory budget is planned on.
        peak_bytes: without repetitions.
    """

    captured: CapturedStep
    recomputable: RecomputableStep
    problems: tuple[RecomputationProblem, ...]
    peak_bytes: int


def step_to_plan(name: str, batch: int, device: str, rewrites: str) -> Step:
    """Return a model's step with the seconds of a device."""
    return _step_of(_case(name, batch), device, rewrites)


def checkpointed_step(name: str, batch: int, device: str, rewrites: str) -> tuple[Step, int] | None:
    """Return the step with checkpoints around blocks, and how many; None if the model has no such blocks."""
    case = _case(name, batch)
    blocks = _checkpoint_blocks(case.model)
    return (_step_of(case, device, rewrites), blocks) if blocks else None


def _case(name: str, batch: int) -> ModelCase:
    return build_model(name, batch_size=batch, tokens=TOKENS, device="meta")


def _step_of(case: ModelCase, device: str, rewrites: str) -> Step:
    optimizer = optimizer_by_name("sgd", case.model.parameters())
    options = Options(rewrites=rewrites)
    request = StepRequest(case.model, case.inputs, Mode.TRAINING, case.loss_fn, optimizer, options)
    return planned_step(capture(request), profile_by_name(device), options)


def planned_step(captured: CapturedStep, profile: DeviceProfile, options: Options) -> Step:
    """Return a captured step with the seconds of a device, after the rewrites of some options."""
    probe = Probe(captured.device, False, lambda _, ask: ask())
    rewriting = Rewriting(captured, GradientsInBuffer(), probe)
    candidate = choose_rewrites(rewriting, options.rewrites)
    recomputable = RecomputableStep.of(rewriting, candidate, profile)
    return Step(captured, recomputable, recomputable.orders(), rewriting.ordered(candidate).peak_bytes)


class _Checkpointed(nn.Module):
    """A block whose activations backward computes again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return checkpoint(self.block, *arguments, use_reentrant=False, **named)

    def __getattr__(self, name: str) -> Any:
        """Look up what a model asks of its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def _checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint the blocks of a model, and return how many there are."""
    blocks = list(_blocks(model))
    for parent, name in blocks:
        setattr(parent, name, _Checkpointed(getattr(parent, name)))
    if blocks:
        return len(blocks)
    parents = [parent for parent in model.modules() if not isinstance(parent, nn.Sequential)]
    return sum(
        _checkpoint_pieces(parent, name, child)
        for parent in parents
        for name, child in list(parent.named_children())
        if isinstance(child, nn.Sequential)
    )


def _blocks(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, child in module.named_children():
        is_listed = isinstance(module, nn.Sequential | nn.ModuleList)
        if is_listed and next(child.children(), None) is not None:
            yield module, name
        else:
            yield from _blocks(child)


def _checkpoint_pieces(parent: nn.Module, name: str, sequence: nn.Sequential) -> int:
    length, pieces = max(1, math.isqrt(len(sequence))), list[list[nn.Module]]()
    for member in sequence:
        # What begins by writing over its input could not begin a second time.
        if not pieces or (len(pieces[-1]) >= length and not getattr(member, "inplace", False)):
            pieces.append([])
        pieces[-1].append(member)
    setattr(parent, name, nn.Sequential(*(_Checkpointed(nn.Sequential(*piece)) for piece in pieces)))
    return len(pieces)
