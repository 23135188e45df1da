"""The rewrites that lower a graph's smallest peak, by name, and what is told of them.

They are in :mod:`olla_fx.passes.rewrites`; a user chooses among them, and a plan says what they did.
"""

from __future__ import annotations

from dataclasses import dataclass

REWRITES = (
    "chunked_loss",
    "activation_outputs",
    "masks_behind_pooling",
    "slices_of_cat",
    "unread_arguments",
    "boolean_masks",
    "narrow_indices",
    "loss_gradients",
    "row_updates",
    "blocked_updates",
    "separate_parts",
    "packed_masks",
)
"""The names of all rewrites in sequence: later ones act on what earlier ones leave."""


@dataclass(frozen=True, slots=True)
class Change:
    """One place in which a rewrite has changed a graph.

    Attributes:
        rewrite: its name, among :data:`REWRITES`, or that of :mod:`olla_fx.sharing`.
        operator: the operator that needed an array, or made a larger one.
        saved_bytes: of what it needs no more. The peak falls by as much if all of that is alive at it.
        extra_operations: additions and multiplications that are done a second time.
        same_bits: False if last bits of results may differ from eager's, which only a user's option does.
    """

    rewrite: str
    operator: str
    saved_bytes: int
    extra_operations: int = 0
    same_bits: bool = True


@dataclass(frozen=True, slots=True)
class LossChunks:
    """How to compute losses over many classes in chunks.

    Attributes:
        count: of chunks.
        may_differ: True if sums may be rounded in another sequence than eager's where bits would differ
            anyway.
    """

    count: int
    may_differ: bool = False
