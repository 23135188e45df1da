"""Fit a LightningModule on handwritten digits twice, eagerly and planned by a callback, and compare.

Prints both losses of every step and whether all are the same.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from olla_fx.models import import_torchvision

import_torchvision()  # torchmetrics imports it, and it may not fit the installed torch
import lightning

from olla_fx.integrations.lightning import OllaCallback


class Digits(lightning.LightningModule):
    """Tells digits apart; keeps its losses."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10)),
        )
        self.losses: list[float] = []

    def training_step(self, batch, index):
        """Compute the loss of a batch; the network in it is what is planned."""
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(steps: int, callbacks: list[lightning.pytorch.callbacks.Callback]) -> list[float]:
    """Fit from the same weights on the same batches every time; return the losses."""
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    dataset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    model = Digits()
    trainer.fit(model, torch.utils.data.DataLoader(dataset, batch_size=32))
    return model.losses


def main() -> int:
    """Fit twice and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each training (default 10)")
    steps = parser.parse_args().steps
    callback = OllaCallback()
    eager, planned = (fit(steps, callbacks) for callbacks in ([], [callback]))
    for step, losses in enumerate(zip(eager, planned, strict=True), start=1):
        print("step {:3d}  eager {:.6f}  planned {:.6f}".format(step, *losses))
    print(callback.plans)
    print("losses identical", "yes" if eager == planned else "NO")
    return eager != planned


if __name__ == "__main__":
    sys.exit(main())
