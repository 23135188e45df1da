"""Builds the zoo's transformers models: inputs and a loss for each task, with padding masks or without."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_architectures import ARCHITECTURES, LABELS, TOKENS, VOCABULARY

from olla_fx.models import ModelCase, import_torchvision, logits_loss

BATCH = 2


class Keywords(nn.Module):
    """A model that takes its arguments by name, called with them in order."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Wrap a model.

        Args:
            model: takes keyword arguments.
            names: of the arguments, in the order in which they will be given.
        """
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *values: torch.Tensor) -> Any:
        """Call the model.

        Args:
            values: one for each name.
        """
        return self.model(**dict(zip(self.names, values, strict=True)))


@dataclass(frozen=True)
class Task:
    """The inputs, target and loss of a kind of model.

    Attributes:
        builder: the class of transformers that builds it from a configuration.
        inputs: makes arguments by name from a configuration, for so many examples.
        target: makes the target, likewise.
        loss: of outputs and target.
    """

    builder: str
    inputs: Callable[[Any, int], dict[str, torch.Tensor]]
    target: Callable[[Any, int], torch.Tensor]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = logits_loss


def _tokens(batch: int, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def _labels(_: Any, batch: int) -> torch.Tensor:
    return torch.randint(LABELS, (batch,))


def _size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", 64)
    return (size, size) if isinstance(size, int) else tuple(size)


def _pixels(config: Any, batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, *_size(config))


def _frames(config: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, config.num_frames, 3, *_size(config))}


def _wave(_: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, 800)}


def _spectrum(config: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)}


def _pair(config: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(batch), "pixel_values": _pixels(config.vision_config, batch)}


def _text(_: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(batch)}


def _pictures(config: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(config, batch)}


def hidden_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of the mean hidden state: trains models that have no head.

    Args:
        outputs: whose first field is ``[batch, positions, width]``.
        target: labels below the width.
    """
    return F.cross_entropy(outputs[0].mean(1), target)


def matching_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute the loss of matching texts to images.

    Args:
        outputs: with a field ``logits_per_image``.
        target: for each image the number of its text.
    """
    return F.cross_entropy(outputs.logits_per_image, target)


def detection_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute a loss of all queries against one class: the matching of DETR depends on data.

    Args:
        outputs: with fields ``logits`` and ``pred_boxes``.
        target: a class for each query.
    """
    return (
        F.cross_entropy(outputs.logits.flatten(0, 1), target.flatten()) + outputs.pred_boxes.square().mean()
    )


def pixel_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of every pixel.

    Args:
        outputs: with a field ``logits``, ``[batch, classes, height, width]``.
        target: a class for each image, taken for all its pixels.
    """
    logits = outputs.logits
    return F.cross_entropy(logits, target[:, None, None].expand(-1, *logits.shape[2:]))


def _queries(config: Any, batch: int) -> torch.Tensor:
    count = getattr(config, "num_queries", None) or config.num_detection_tokens
    return torch.randint(LABELS, (batch, count))


TASKS = {
    "classify": Task("AutoModelForSequenceClassification", _text, _labels),
    "fill": Task("AutoModelForMaskedLM", _text, lambda _, batch: _tokens(batch)),
    "generate": Task("AutoModelForCausalLM", _text, lambda _, batch: _tokens(batch)),
    "translate": Task(
        "AutoModelForSeq2SeqLM",
        lambda _, batch: {"input_ids": _tokens(batch), "decoder_input_ids": _tokens(batch, 8)},
        lambda _, batch: _tokens(batch, 8),
    ),
    "encode": Task("AutoModel", _text, _labels, hidden_loss),
    "see": Task("AutoModelForImageClassification", _pictures, _labels),
    "watch": Task("AutoModelForVideoClassification", _frames, _labels),
    "segment": Task("AutoModelForSemanticSegmentation", _pictures, _labels, pixel_loss),
    "detect": Task("AutoModelForObjectDetection", _pictures, _queries, detection_loss),
    "hear": Task("AutoModelForAudioClassification", _wave, _labels),
    "hear-spectrum": Task(
        "AutoModelForAudioClassification",
        lambda config, batch: {"input_values": torch.randn(batch, config.max_length, config.num_mel_bins)},
        _labels,
    ),
    "transcribe": Task(
        "AutoModelForSpeechSeq2Seq",
        lambda config, batch: {**_spectrum(config, batch), "decoder_input_ids": _tokens(batch, 8)},
        lambda _, batch: _tokens(batch, 8),
    ),
    "match": Task("AutoModel", _pair, lambda _, batch: torch.arange(batch), matching_loss),
}
"""The tasks that models are built for."""

MASKS = {"ones": slice(0, 0), "right": slice(-3, None), "left": slice(0, 3)}
"""Masks of texts by name, and the tokens that they hide in the last text."""


def takes_mask(name: str) -> bool:
    """Return True if an architecture's inputs are texts, which a mask can hide tokens of."""
    return ARCHITECTURES[name][0] in _MASK_NAMES and name not in _WITHOUT_MASK


_MASK_NAMES = dict.fromkeys(
    ("classify", "fill", "generate", "translate", "encode", "match"), "attention_mask"
) | {"transcribe": "decoder_attention_mask"}
_WITHOUT_MASK = frozenset(("fnet", "nystromformer"))


def transformers_case(name: str, mask: str | None = None, batch: int = BATCH) -> ModelCase:
    """Build an architecture from its small configuration, weights drawn from torch's generator.

    Args:
        name: a key of :data:`ARCHITECTURES`.
        mask: a key of :data:`MASKS`; None for no mask.
        batch: how many examples.

    Returns:
        Model, example and loss, in training mode.
    """
    import_torchvision()  # transformers imports it when it is there
    transformers = importlib.import_module("transformers")
    task_name, values = ARCHITECTURES[name]
    task = TASKS[task_name]
    config = transformers.AutoConfig.for_model(name, **values)
    model = getattr(transformers, task.builder).from_config(config)
    inputs = task.inputs(config, batch)
    if mask is not None:
        tokens = inputs["decoder_input_ids" if task_name == "transcribe" else "input_ids"]
        visible = inputs[_MASK_NAMES[task_name]] = torch.ones_like(tokens)
        visible[-1, MASKS[mask]] = 0
    case = ModelCase(
        Keywords(model, tuple(inputs)), (*inputs.values(), task.target(config, batch)), task.loss
    )
    case.model.train()
    return case
