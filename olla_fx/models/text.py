"""Builds models of transformers from configurations, never from downloaded weights."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.models.case import IMAGE_SIZE, ModelCase, Wanted, labels, require_package, unknown
from olla_fx.models.vision import import_torchvision

TOKENS = 16
"""Default length of a text."""

_ARCHITECTURES = {
    "bert": "classify", "distilbert": "classify", "electra": "classify", "roberta": "classify",
    "xlm-roberta": "classify", "gpt2": "generate", "llama": "generate", "vit": "see",
}  # fmt: skip
"""Supported architectures of transformers and their tasks."""

_SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 1024, "embedding_size": 128,
}  # fmt: skip


def transformers_case(name: str, wanted: Wanted) -> ModelCase:
    """Build a model of transformers.

    Args:
        name: without its family.
        wanted: the sizes.

    Returns:
        Model, example and loss.

    Raises:
        ModelLookupError: if the name is unknown or the package is not installed.
    """
    architecture = name.removesuffix("-base")
    if architecture not in _ARCHITECTURES:
        raise unknown(name, "transformers", _ARCHITECTURES)
    require_package("transformers")
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it if it is installed
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(architecture)
    if name == architecture:
        for key, value in _SMALL.items():
            if hasattr(config, key):
                setattr(config, key, value)
    task = _ARCHITECTURES[architecture]
    if task == "see":
        config.image_size = wanted.image_size or IMAGE_SIZE
        x = torch.randn(wanted.batch_size, 3, config.image_size, config.image_size)
        model = transformers.AutoModelForImageClassification.from_config(config)
        return ModelCase(model, (x, labels(config.num_labels, wanted)), logits_loss)
    x = torch.randint(2, config.vocab_size, (wanted.batch_size, wanted.tokens))
    if task == "generate":
        config.use_cache = False
        model = CausalLanguageModel(transformers.AutoModelForCausalLM.from_config(config))
        return ModelCase(model, (x, torch.randint(config.vocab_size, tuple(x.shape))), logits_loss)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    return ModelCase(model, (x, labels(config.num_labels, wanted)), logits_loss)


class CausalLanguageModel(nn.Module):
    """A language model with an explicit causal mask, of which transformers asks no values."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model.

        Args:
            model: takes token numbers and a mask.
        """
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        """Compute the logits for the token after each one.

        Args:
            tokens: numbers, a text in each row.
        """
        length = tokens.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        return self.model(tokens, attention_mask=visible.expand(tokens.shape[0], 1, length, length))


def logits_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of the logits of a transformers model.

    Args:
        outputs: with a field ``logits``, whose last dimension are the classes.
        target: class labels, one for each row of the logits.

    Returns:
        The mean.
    """
    return F.cross_entropy(outputs.logits.flatten(0, -2), target.flatten())
