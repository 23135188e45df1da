"""Small models of transformers, padded batches for them, and Trainer around both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
LENGTH = 8
IGNORED = -100


def bert() -> nn.Module:
    """Return a classifier that does not know yet what its labels mean."""
    config = transformers.BertConfig(**SIZES)
    return transformers.BertForSequenceClassification(config).train()


def gpt2() -> nn.Module:
    """Return a language model as it comes, with its cache for generating."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


class CountedGPT2(transformers.GPT2LMHeadModel):
    """Divides its loss by the number of words that Trainer counts in all batches of an update."""

    accepts_loss_kwargs = True  # asked for by Trainer

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the scores.

        Args:
            input_ids: words.
            attention_mask: False where texts are padded.
            labels: the same words, and :data:`IGNORED`.
            num_items_in_batch: the number of labels; None for the mean of this batch.
        """
        scores = super().forward(input_ids, attention_mask=attention_mask, use_cache=False).logits
        losses = [scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()]
        if num_items_in_batch is None:
            return F.cross_entropy(*losses), scores
        return F.cross_entropy(*losses, reduction="sum") / num_items_in_batch, scores


def counted_gpt2() -> nn.Module:
    """Return a language model that names ``num_items_in_batch``."""
    return CountedGPT2(gpt2().config).train()


Features = list[dict[str, Any]]


def texts(count: int) -> Features:
    """Return tokens of several lengths with a class, and a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    features = []
    for index in range(count):
        length = LENGTH - int(torch.randint(4, (1,), generator=generator))
        tokens = torch.randint(2, 32, (length,), generator=generator)
        features.append({"input_ids": tokens, "label": int(tokens.sum()) % 2, "number": index})
    return features


def padded(model: nn.Module, features: Features, *, longest: int | None = LENGTH) -> dict[str, torch.Tensor]:
    """Return a padded batch, all as long as ``longest``, or as the longest of them."""
    assert all("number" not in feature for feature in features), "a column that forward does not name"
    length = longest or max(len(feature["input_ids"]) for feature in features)
    tokens = torch.zeros(len(features), length, dtype=torch.long)
    for row, feature in zip(tokens, features, strict=True):
        row[: len(feature["input_ids"])] = feature["input_ids"]
    mask = (tokens != 0).long()
    labels = torch.tensor([feature["label"] for feature in features])
    if "GPT2" in type(model).__name__:
        labels = tokens.masked_fill(tokens == 0, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Trained(NamedTuple):
    """The outcome of a training."""

    trainer: Any
    model: nn.Module
    history: list[dict[str, float]]


def train(
    make: Callable[[], nn.Module],
    folder: Path,
    plan: Callable[[nn.Module, dict[str, torch.Tensor]], nn.Module] | None = None,
    callbacks: Sequence[Any] = (),
    *,
    longest: int | None = LENGTH,
    resume: bool = False,
    **arguments: Any,
) -> Trained:
    """Train a model, which is planned before if ``plan`` says how, with evaluations and checkpoints.

    Args:
        make: makes the model.
        folder: for checkpoints.
        plan: takes the model and a batch.
        callbacks: Trainer's.
        longest: as of :func:`padded`.
        resume: True to go on from the last checkpoint.
        arguments: of ``TrainingArguments``.
    """
    torch.manual_seed(0)
    model = make()
    features = texts(14)  # the last batch is smaller
    without_number = [{**feature} for feature in features[:4]]
    for feature in without_number:
        del feature["number"]
    trained = model if plan is None else plan(model, padded(model, without_number))
    trainer = transformers.Trainer(
        model=trained,
        args=transformers.TrainingArguments(
            **{
                "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 1,
                "logging_steps": 1, "num_train_epochs": 3, "learning_rate": 1e-2, "save_strategy": "epoch",
                "eval_strategy": "epoch", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
                **arguments,
            }
        ),
        train_dataset=features,
        eval_dataset=features[:8],
        data_collator=lambda batch: padded(model, batch, longest=longest),
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return Trained(trainer, model, [_without_times(entry) for entry in trainer.state.log_history])


def _without_times(entry: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
