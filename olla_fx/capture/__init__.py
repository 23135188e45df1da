"""Captures a model and an example as one fx graph of the whole step."""

from olla_fx.capture.step import capture
from olla_fx.capture.types import CapturedStep, StepRequest
from olla_fx.guards import Mode, Role, StepInput, TensorSlot, TensorSpec

__all__ = [
    "CapturedStep",
    "Mode",
    "Role",
    "StepInput",
    "StepRequest",
    "TensorSlot",
    "TensorSpec",
    "capture",
]
