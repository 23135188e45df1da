"""Model and example → one fx graph of the whole step."""

from olla_fx.capture.inputs import Role, StepInput, TensorSlot, TensorSpec
from olla_fx.capture.step import CapturedStep, Mode, StepRequest, capture

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
