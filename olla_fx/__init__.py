"""Plans a PyTorch model's whole step for the smallest peak memory and runs it in one buffer.

``optimize`` returns a module that runs, ``plan`` only says what it would need. See ``docs/design.md``.

What is public is imported when it is first used: torch takes seconds to import, and the command line's help
and its solvers do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olla_fx.api import optimize, plan
    from olla_fx.arena import Binding, interrupted
    from olla_fx.dynamo import compiled_reports
    from olla_fx.eager.record import LoopReport, Recording, record
    from olla_fx.errors import (
        ArenaBusyError,
        ArenaUnavailableError,
        BackwardError,
        BudgetError,
        BufferMemoryError,
        CaptureError,
        HostMemoryError,
        OllaError,
        RecordingError,
        StepInputError,
        StepModeError,
        SwapError,
        UnsupportedOptimizerError,
    )
    from olla_fx.options import Options
    from olla_fx.rewrites import REWRITES
    from olla_fx.run import PlannedModule
    from olla_fx.step_plan import Plan
    from olla_solvers.errors import OptionError, SolverUnavailableError

__all__ = [
    "REWRITES",
    "ArenaBusyError",
    "ArenaUnavailableError",
    "BackwardError",
    "Binding",
    "BudgetError",
    "BufferMemoryError",
    "CaptureError",
    "HostMemoryError",
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
    "SwapError",
    "UnsupportedOptimizerError",
    "compiled_reports",
    "interrupted",
    "optimize",
    "plan",
    "record",
]
__version__ = "0.1.0"

_NAMES_OF = {
    "olla_fx.api": ("optimize", "plan"),
    "olla_fx.arena": ("Binding", "interrupted"),
    "olla_fx.dynamo": ("compiled_reports",),
    "olla_fx.eager.record": ("LoopReport", "Recording", "record"),
    "olla_fx.errors": (
        "ArenaBusyError",
        "ArenaUnavailableError",
        "BackwardError",
        "BudgetError",
        "BufferMemoryError",
        "CaptureError",
        "HostMemoryError",
        "OllaError",
        "RecordingError",
        "StepInputError",
        "StepModeError",
        "SwapError",
        "UnsupportedOptimizerError",
    ),
    "olla_fx.options": ("Options",),
    "olla_fx.rewrites": ("REWRITES",),
    "olla_fx.step_plan": ("Plan",),
    "olla_fx.run": ("PlannedModule",),
    "olla_solvers.errors": ("OptionError", "SolverUnavailableError"),
}
"""The public names by the module that defines them, as imported above for type checkers."""

_HOME_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


if not TYPE_CHECKING:
    # To a type checker every name would be an attribute.

    def __getattr__(name: str) -> Any:
        """Import a public name from its module, once (PEP 562)."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
