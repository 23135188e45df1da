"""The arguments and results of building a model, and helpers that the builders share."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx.errors import ModelLookupError

LossFunction = Callable[..., torch.Tensor]

IMAGE_SIZE = 224
CLASSES = 1000


@dataclass(frozen=True)
class ModelCase:
    """A model with all that planning its step needs.

    Attributes:
        model: in training or evaluation mode, as asked.
        inputs: an example: the model's arguments and, for training, the target as the last.
        loss_fn: ``loss_fn(model(*inputs), target)``; None for inference.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss_fn: LossFunction | None


@dataclass(frozen=True)
class Wanted:
    """The arguments of :func:`olla_fx.models.build_model` behind the name.

    Attributes:
        batch_size: examples in a batch.
        image_size: height and width of images; None for what the model was made for.
        tokens: length of text.
        train: True if the case is for training.
    """

    batch_size: int
    image_size: int | None
    tokens: int
    train: bool


def unknown(name: str, family: str, known: Iterable[str]) -> ModelLookupError:
    """Return the error for a name that is not among those known.

    Args:
        name: the user's.
        family: of models that should have it.
        known: all names of the family.

    Returns:
        An error that names the closest ones.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"some that are known: {', '.join(names[:12])}"
    return ModelLookupError(f"unknown {family} model {name!r}; {hint}")


def require_package(package: str) -> None:
    """Refuse a model whose package is missing.

    Args:
        package: a module's name.

    Raises:
        ModelLookupError: if it is missing; names the extra that brings it.
    """
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ModelLookupError(f"{package} is not installed; pip install 'olla-fx[models]'")


def labels(classes: int, wanted: Wanted) -> torch.Tensor:
    """Draw random class labels, one for each example."""
    return torch.randint(classes, (wanted.batch_size,))
