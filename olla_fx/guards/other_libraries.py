"""Names what models of other libraries do beside computing: it changes no result, so no step repeats it."""

from __future__ import annotations

from torch import nn

HARMLESS_HOOKS = ("torch.nn.utils", "transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks act within a forward alone, and so may be traced with it: ``weight_norm`` and the like,
those that gather hidden states for ``output_hidden_states``, and those that let checkpointed layers see an
input that wants a gradient (``activation_checkpointing_enable``)."""

HARMLESS_ATTRIBUTES = frozenset({"_output_capturing_hooks_installed"})
"""Attributes that say if such hooks were added yet, which a model's first forward does."""

_LIBRARY_OF_CACHES = "transformers."
_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


def silence(module: nn.Module) -> None:
    """Keep a copied module from looking at values of its input just to warn about them.

    A method of transformers' models looks for padding among token numbers. It skips traced tensors, but
    does not recognise those of AOTAutograd.
    """
    if hasattr(module, _PADDING_WARNING):
        setattr(module, _PADDING_WARNING, _no_warning)


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
