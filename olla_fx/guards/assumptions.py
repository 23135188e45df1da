"""What a plan assumes of the model, the optimizer and the settings that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from olla_fx.guards.inputs import Mode, StepInput, TensorSlot
from olla_fx.guards.optimizer import OptimizerLayout
from olla_fx.guards.reads import Reads


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Everything that guards check before a plan runs.

    Attributes:
        mode: what the step does.
        inputs: what each placeholder is, in order.
        written: indices of the placeholders whose storage the step writes.
        slots: the model's tensors with all their places.
        optimizer: what was assumed of the optimizer, when training.
        state_keys: for each parameter that is updated, the keys of its optimizer state.
        module_training: training flag of every module, by name.
        reads: the Python values that were read and baked.
        device: where everything lives.
        autocast: True if autocast was on, its dtype, and True if it keeps what it casts.
        kernel_settings: number of threads and the like, on which recorded workspaces depend.
    """

    mode: Mode
    inputs: tuple[StepInput, ...]
    written: frozenset[int]
    slots: tuple[tuple[TensorSlot, ...], ...]
    optimizer: OptimizerLayout | None
    state_keys: Mapping[str, tuple[str, ...]]
    module_training: Mapping[str, bool]
    reads: Reads
    device: torch.device
    autocast: tuple[bool, torch.dtype, bool]
    kernel_settings: tuple[object, ...]
