"""Runs a planned step: looks its inputs up, records a call, serves the rest from one buffer."""

from olla_fx.run.module import PlannedModule
from olla_fx.run.stats import StepReport, StepStats

__all__ = ["PlannedModule", "StepReport", "StepStats"]
