"""Plans a PyTorch model's whole step for the smallest peak memory and runs it in one buffer.

``optimize`` returns a module that runs, ``plan`` only says what it would need. See ``docs/design.md``.
"""

from olla_fx.api import optimize, plan
from olla_fx.arena import Binding, interrupted
from olla_fx.dynamo import compiled_reports
from olla_fx.eager.record import LoopReport, Recording, record
from olla_fx.errors import (
    ArenaBusyError,
    ArenaUnavailableError,
    BackwardError,
    BufferMemoryError,
    CaptureError,
    OllaError,
    RecordingError,
    StepInputError,
    StepModeError,
    UnsupportedOptimizerError,
)
from olla_fx.options import Options
from olla_fx.plan import Plan
from olla_fx.run import PlannedModule
from olla_solvers.errors import OptionError, SolverUnavailableError

__all__ = [
    "ArenaBusyError",
    "ArenaUnavailableError",
    "BackwardError",
    "Binding",
    "BufferMemoryError",
    "CaptureError",
    "LoopReport",
    "OllaError",
    "OptionError",
    "Options",
    "Plan",
    "PlannedModule",
    "Recording",
    "RecordingError",
    "SolverUnavailableError",
    "StepInputError",
    "StepModeError",
    "UnsupportedOptimizerError",
    "compiled_reports",
    "interrupted",
    "optimize",
    "plan",
    "record",
]
__version__ = "0.1.0"
