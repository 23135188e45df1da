"""Train a small BERT with Trainer of transformers twice, eagerly and planned by a callback, and compare.

The texts are made up, padded to one length. Prints both losses of every step and whether all are the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch

from olla_fx.models import import_torchvision

import_torchvision()  # transformers imports it, and it may not fit the installed torch
import transformers

from olla_fx.integrations.hugging_face import OllaCallback


def texts(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return padded texts of several lengths; the class says if there are more high tokens than low ones."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        tokens = torch.randint(1, 512, (length,), generator=generator)
        tokens[int(torch.randint(length // 2, length + 1, (1,), generator=generator)) :] = 0
        label = (tokens >= 256).sum() * 2 > (tokens > 0).sum()
        made.append({"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": label.long()})
    return made


def train(steps: int, folder: str, callbacks: list[transformers.TrainerCallback]) -> list[float]:
    """Train from the same weights on the same batches every time; return the losses."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    trainer = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=texts(steps * 8),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    """Train twice and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each training (default 10)")
    steps = parser.parse_args().steps
    callback = OllaCallback()
    with tempfile.TemporaryDirectory() as folder:
        eager, planned = (train(steps, folder, callbacks) for callbacks in ([], [callback]))
    for step, losses in enumerate(zip(eager, planned, strict=True), start=1):
        print("step {:3d}  eager {:.6f}  planned {:.6f}".format(step, *losses))
    print(callback.plan)
    print("losses identical", "yes" if eager == planned else "NO")
    return eager != planned


if __name__ == "__main__":
    sys.exit(main())
