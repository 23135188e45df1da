"""Defines the cases: loops as users write them, their models in eager or planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.models import build_model, import_torchvision

from .models import (
    NOISE,
    CheckpointedBlocks,
    Recurrent,
    SmallGPT,
    UNet,
    discriminator,
    generator,
    token_loss,
)

Run = Callable[[], object]
"""Runs one step of a loop."""

Optimizer = Callable[..., torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of most cases; it has no state, so that growth is the step's own."""
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True)
class Loop:
    """A loop whose models, optimizers and inputs are there, and which has not run.

    Attributes:
        models: those that are planned in the caller's own loop, each with an example of its inputs.
        step: runs one step with these models, or what stands for them.
        whole: plans one or more whole steps, and returns what runs one step of the loop with them; None if
            the loop has no whole step that could be planned.
    """

    models: Sequence[tuple[nn.Module, tuple[Any, ...]]]
    step: Callable[[Sequence[Callable[..., Any]]], object]
    whole: Callable[[], Run] | None


def training(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., torch.Tensor],
    make_optimizer: Optimizer = sgd,
    micro_batches: int = 1,
) -> Loop:
    """Return the usual loop: gradients to none, forward, loss, backward, update.

    Args:
        model: in training mode.
        batch: its inputs, the target last.
        loss_fn: takes its output and the target.
        make_optimizer: takes its parameters.
        micro_batches: pieces of the batch whose gradients accumulate.
    """
    optimizer = make_optimizer(model.parameters())
    pieces = list(zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True))

    def step(called: Sequence[Callable[..., Any]]) -> None:
        optimizer.zero_grad()
        for *inputs, target in pieces:
            (loss_fn(called[0](*inputs), target) / micro_batches).backward()
        optimizer.step()

    def whole() -> Run:
        planned = olla_fx.optimize(
            model, batch, loss_fn=loss_fn, optimizer=optimizer, accumulation_steps=micro_batches
        )
        return partial(planned, *batch)

    return Loop([(model, tuple(pieces[0][:-1]))], step, whole)


def in_turn(loops: Sequence[Loop]) -> Loop:
    """Return a loop each of whose steps runs a step of several loops of one model, one after the other."""

    def step(called: Sequence[Callable[..., Any]]) -> None:
        for loop, model in zip(loops, called, strict=True):
            loop.step([model])

    def whole() -> Run:
        steps = [loop.whole() for loop in loops if loop.whole is not None]
        return lambda: [run() for run in steps]

    return Loop([model for loop in loops for model in loop.models], step, whole)


def gan(width: int, batch: int) -> Loop:
    """Return the loop of PyTorch's DCGAN tutorial: real images, generated ones, then the generator."""
    make, tell = generator(width), discriminator(width)
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (tell, make)]
    real, noise = torch.randn(batch, 3, 64, 64), torch.randn(batch, NOISE, 1, 1)
    ones, zeros = torch.ones(batch), torch.zeros(batch)
    loss_fn = F.binary_cross_entropy_with_logits

    def step(called: Sequence[Callable[..., Any]]) -> None:
        make_images, tell_apart = called
        optimizers[0].zero_grad()
        loss_fn(tell_apart(real), ones).backward()
        images = make_images(noise)
        loss_fn(tell_apart(images.detach()), zeros).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss_fn(tell_apart(images), ones).backward()
        optimizers[1].step()

    return Loop([(make, (noise,)), (tell, (real,))], step, None)


def distillation(batch: int, size: int) -> Loop:
    """Return a loop in which a student learns the logits of a teacher that only infers."""
    models = import_torchvision().models
    teacher, student = models.resnet34().eval(), models.resnet18()
    optimizer = sgd(student.parameters())
    images = torch.randn(batch, 3, size, size)

    def loss_fn(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.kl_div(logits.log_softmax(1), wanted.softmax(1), reduction="batchmean")

    def step(called: Sequence[Callable[..., Any]]) -> None:
        ask, learn = called
        with torch.no_grad():
            wanted = ask(images)
        optimizer.zero_grad()
        loss_fn(learn(images), wanted).backward()
        optimizer.step()

    def whole() -> Run:
        ask = olla_fx.optimize(teacher, images)
        example = (images, images.new_zeros(batch, 1000))
        learn = olla_fx.optimize(student, example, loss_fn=loss_fn, optimizer=optimizer)

        def run() -> object:
            with torch.no_grad():
                wanted = ask(images)
            return learn(images, wanted)

        return run

    return Loop([(teacher, (images,)), (student, (images,))], step, whole)


def blocks(count: int, width: int, rows: int, dropout: float) -> Loop:
    """Return the training of checkpointed blocks."""
    batch = torch.randn(rows, width), torch.randint(10, (rows,))
    return training(CheckpointedBlocks(count, width, dropout), batch, F.cross_entropy)


def u_net(width: int, batch: int, size: int) -> Loop:
    """Return the training of a U-Net."""
    images, masks = torch.randn(batch, 3, size, size), torch.rand(batch, 1, size, size)
    return training(UNet(width), (images, masks), F.binary_cross_entropy_with_logits)


def language(model: nn.Module, batch: int, tokens: int, optimizer: Optimizer = sgd, pieces: int = 1) -> Loop:
    """Return the training of a language model."""
    texts = torch.randint(2048, (2, batch, tokens)).unbind()
    return training(model, texts, token_loss, optimizer, pieces)


def named(name: str, batch: int, tokens: int = 16, micro_batches: int = 1) -> Loop:
    """Return the training of a model of :mod:`olla_fx.models`."""
    case = build_model(name, batch_size=batch, tokens=tokens, device=str(torch.get_default_device()))
    if case.loss_fn is None:
        raise ValueError(f"{name} has no loss")
    return training(case.model, case.inputs, case.loss_fn, micro_batches=micro_batches)


def vit(layers: int, width: int, batch: int) -> Loop:
    """Return the training of a vision transformer."""
    model = import_torchvision().models.VisionTransformer(224, 16, layers, width // 64, width, 4 * width)
    return training(model, (torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))), F.cross_entropy)


CASES: dict[str, Callable[[], Loop]] = {
    "24 checkpointed blocks": lambda: blocks(24, 128, 2048, 0.0),
    "24 checkpointed blocks, dropout": lambda: blocks(24, 128, 2048, 0.1),
    "8 checkpointed blocks": lambda: blocks(8, 256, 4096, 0.0),
    "8 checkpointed blocks, dropout": lambda: blocks(8, 256, 4096, 0.1),
    "three U-Nets in turn": lambda: in_turn([u_net(32, 4, 96) for _ in range(3)]),
    "U-Net": lambda: u_net(32, 8, 128),
    "small GPT": lambda: language(SmallGPT(6, 256, 128), 24, 128),
    "16 micro-batches": lambda: language(SmallGPT(4, 32, 16), 16, 16, pieces=16),
    "ResNet-18": lambda: named("torchvision:resnet18", 8),
    "ResNet-50": lambda: named("torchvision:resnet50", 4),
    "ViT-S": lambda: vit(12, 384, 4),
    "GPT-2": lambda: named("transformers:gpt2-base", 1, 128),
    "LSTM": lambda: language(Recurrent(256, 2), 16, 64),
    "gradient accumulation": lambda: named("torchvision:resnet18", 8, micro_batches=4),
    "GAN": lambda: gan(64, 32),
    "teacher and student": lambda: distillation(16, 112),
    "AdamW": lambda: language(SmallGPT(6, 256, 128), 8, 128, torch.optim.AdamW),
}
"""Name → builds a case's models, optimizers and inputs."""
