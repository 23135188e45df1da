"""Guards: what tracing read → a snapshot → one generated function that says if a plan still fits."""

from olla_fx.guards.exact import Assumptions
from olla_fx.guards.inputs import (
    WANTS_GRADIENT,
    Mode,
    Role,
    StepInput,
    TensorSlot,
    TensorSpec,
    step_modules,
)
from olla_fx.guards.numbers import LateBinding, NumberSlot
from olla_fx.guards.optimizer import OptimizerLayout, ScalarSlot, TensorHyperparameter
from olla_fx.guards.prologue import Mismatch, Prologue
from olla_fx.guards.questions import Question, QuestionGuard
from olla_fx.guards.reads import MODULE_TABLES, Reads
from olla_fx.guards.recipes import Comparison, FromCounts, GivenInput, Recipe
from olla_fx.guards.writes import NO_WRITES, FirstWrites, first_writes, plain_values

__all__ = [
    "MODULE_TABLES",
    "NO_WRITES",
    "WANTS_GRADIENT",
    "Assumptions",
    "Comparison",
    "FirstWrites",
    "FromCounts",
    "GivenInput",
    "LateBinding",
    "Mismatch",
    "Mode",
    "NumberSlot",
    "OptimizerLayout",
    "Prologue",
    "Question",
    "QuestionGuard",
    "Reads",
    "Recipe",
    "Role",
    "ScalarSlot",
    "StepInput",
    "TensorHyperparameter",
    "TensorSlot",
    "TensorSpec",
    "first_writes",
    "plain_values",
    "step_modules",
]
