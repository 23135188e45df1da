"""Lists the published planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.activation_budget import dynamic_budget, greedy_budget
from olla_solvers.recomputation.published.low_cost import low_cost
from olla_solvers.recomputation.published.recursive import recursive
from olla_solvers.recomputation.published.retention import retention
from olla_solvers.recomputation.published.segments import segments, segments_by_cost, sublinear

Method: TypeAlias = Callable[[RecomputationProblem, Bytes], Recomputation]
"""Returns its fastest plan within a budget of bytes, or the one of smallest peak if it has none within it."""

HEURISTICS: Mapping[str, Method] = {
    "chen-search": sublinear,
    "chen-segments": segments,
    "chen-segments-by-cost": segments_by_cost,
    "chen-low-cost": low_cost,
    "chen-recursive": recursive,
    "minimum-cut-dynamic": dynamic_budget,
    "minimum-cut-greedy": greedy_budget,
}
"""Planners for steps of any size."""

PROGRAMS: Mapping[str, Method] = {
    f"retention-{solver}": partial(retention, solver=solver) for solver in ("cbc", "gurobi", "highs")
}
"""The integer program, for small steps, by solver; larger ones get the best plan of the heuristics."""

METHODS: Mapping[str, Method] = {**HEURISTICS, **PROGRAMS}
"""All planners by name."""
