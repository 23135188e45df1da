"""Captures a model and an example as one fx graph of the whole step."""

from olla_fx.capture.inputs import Role, StepInput, TensorSlot, TensorSpec
from olla_fx.capture.step import capture
from olla_fx.capture.types import CapturedStep, Mode, StepRequest

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
