"""What models of other libraries do beside computing, changing no result: no step need repeat it."""

from __future__ import annotations

from torch import nn

HARMLESS_HOOKS = ("torch.nn.utils", "transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks act within a forward alone, and so may be traced with it: ``weight_norm`` and the like,
what gathers hidden states for ``output_hidden_states``, and what lets checkpointed layers see an input that
wants a gradient (``activation_checkpointing_enable``)."""

HARMLESS_ATTRIBUTES = frozenset({"_output_capturing_hooks_installed"})
"""Attributes that say whether such hooks were added yet, which a model's first forward does."""

_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


def silence(module: nn.Module) -> None:
    """Keep a copied module from looking at values of its input just to warn about them.

    A method of transformers' models looks for padding among token numbers. It leaves traced tensors alone,
    but AOTAutograd's it cannot tell.
    """
    if hasattr(module, _PADDING_WARNING):
        setattr(module, _PADDING_WARNING, _no_warning)


def _no_warning(*_: object, **__: object) -> None:
    """In the place of a method that only warns."""
