"""Makes optimizers of ``torch.optim`` by name, with their default flags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from olla_fx.errors import ModelLookupError

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rprop": (torch.optim.Rprop, {}),
}
OPTIMIZERS = tuple(_OPTIMIZERS)
"""Names for :func:`optimizer_by_name`."""


def optimizer_by_name(
    name: str, parameters: Iterable[nn.Parameter], lr: float = 0.1
) -> torch.optim.Optimizer:
    """Make an optimizer of ``torch.optim`` with its default flags.

    Args:
        name: one of :data:`OPTIMIZERS`.
        parameters: those to train.
        lr: learning rate.

    Returns:
        The optimizer.

    Raises:
        ModelLookupError: if the name is unknown.
    """
    if name not in _OPTIMIZERS:
        raise ModelLookupError(f"unknown optimizer {name!r}; one of {', '.join(OPTIMIZERS)}")
    kind, options = _OPTIMIZERS[name]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return kind(trainable, lr=lr, **options)  # type: ignore[call-arg]
