"""Lists the published planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.activation_budget import dynamic_budget, greedy_budget
from olla_solvers.recomputation.published.low_cost import low_cost
from olla_solvers.recomputation.published.recursive import recursive
from olla_solvers.recomputation.published.segments import segments, segments_by_cost, sublinear

Method: TypeAlias = Callable[[RecomputationProblem, Bytes], Recomputation]
"""Returns its fastest plan within a budget of bytes, or the one of smallest peak if it has none within it."""

METHODS: Mapping[str, Method] = {
    "chen-search": sublinear,
    "chen-segments": segments,
    "chen-segments-by-cost": segments_by_cost,
    "chen-low-cost": low_cost,
    "chen-recursive": recursive,
    "minimum-cut-dynamic": dynamic_budget,
    "minimum-cut-greedy": greedy_budget,
}
"""Planners by name."""
