"""Runs a planned step: gathers its inputs, records the first call, replays the rest in one buffer."""

from olla_fx.run.executor import Binding, Executor, RunCounts
from olla_fx.run.module import MOST_PLANS, Compile, PlannedModule
from olla_fx.run.plan_cache import CompiledStep
from olla_fx.run.shared_buffer import SharedBuffer

__all__ = [
    "MOST_PLANS",
    "Binding",
    "Compile",
    "CompiledStep",
    "Executor",
    "PlannedModule",
    "RunCounts",
    "SharedBuffer",
]
