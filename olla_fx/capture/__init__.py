"""Model and example → one fx graph of the whole step."""

from olla_fx.capture.recipe import Recipe
from olla_fx.capture.step import capture
from olla_fx.capture.types import CapturedStep, StepRequest
from olla_fx.guards import Mode, Role, StepInput, TensorSlot, TensorSpec

__all__ = [
    "CapturedStep",
    "Mode",
    "Recipe",
    "Role",
    "StepInput",
    "StepRequest",
    "TensorSlot",
    "TensorSpec",
    "capture",
]
