"""Plans a PyTorch model's whole step for the smallest peak memory and runs it in one buffer.

``optimize`` returns a module that runs, ``plan`` only says what it would need. See ``docs/design.md``.
"""

from olla_fx.api import optimize, plan
from olla_fx.errors import (
    CaptureError,
    OllaError,
    StepInputError,
    StepModeError,
    UnsupportedOptimizerError,
)
from olla_fx.plan import Plan
from olla_fx.run import Binding, PlannedModule

__all__ = [
    "Binding",
    "CaptureError",
    "OllaError",
    "Plan",
    "PlannedModule",
    "StepInputError",
    "StepModeError",
    "UnsupportedOptimizerError",
    "optimize",
    "plan",
]
__version__ = "0.1.0"
