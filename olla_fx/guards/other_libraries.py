"""Names what models of other libraries do beside computing: it changes no result, so no step repeats it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

HARMLESS_HOOKS = ("torch.nn.utils", "transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks act within a forward alone, and so may be traced with it: ``weight_norm`` and the like,
those that gather hidden states for ``output_hidden_states``, and those that let checkpointed layers see an
input that wants a gradient (``activation_checkpointing_enable``)."""

HARMLESS_ATTRIBUTES = frozenset({"_output_capturing_hooks_installed"})
"""Attributes that say if such hooks were added yet, which a model's first forward does."""

_CONFIGURATIONS = "transformers.configuration_utils"
_LIBRARY_OF_CACHES = "transformers."
_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


def silence(module: nn.Module) -> None:
    """Keep a copied module from looking at values of its input just to warn about them.

    A method of transformers' models looks for padding among token numbers. It skips traced tensors, but
    does not recognise those of AOTAutograd.
    """
    if hasattr(module, _PADDING_WARNING):
        setattr(module, _PADDING_WARNING, _no_warning)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object that a plan may depend on.

    ``save_pretrained`` of transformers notes the model's class in its configuration, and the name of the
    weights' type in the place of the type, which is the same to whoever reads it.

    Args:
        value: has a ``__dict__``.
    """
    kind: Any = type(value)
    fields: dict[str, Any] = value.__dict__
    if not _is_configuration(kind):
        return fields
    fields = {name: part for name, part in fields.items() if name != "architectures"}
    if isinstance(fields.get("dtype"), torch.dtype):
        fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    return fields


@functools.lru_cache(maxsize=1024)
def _is_configuration(kind: type) -> bool:
    return any(base.__module__ == _CONFIGURATIONS for base in kind.__mro__)


def advice_on(value: object) -> str | None:
    """Return what to do about a value of another library's that enters or leaves a model; None if unknown."""
    kind = type(value)
    if kind.__name__.endswith("Cache") and kind.__module__.startswith(_LIBRARY_OF_CACHES):
        return (
            "transformers keep keys and values of earlier tokens in it to generate, which training has "
            "no use for: set model.config.use_cache = False (as Trainer does), or pass use_cache=False"
        )
    return None


def _no_warning(*_: object, **__: object) -> None:
    """Replace a method that only warns."""
