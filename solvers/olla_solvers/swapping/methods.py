"""Lists the published planners that swap, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from olla_solvers.swapping.autoswap.planner import autoswap, by_score
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.least_recently_used import least_recently_used
from olla_solvers.swapping.longest_reused import longest_reused
from olla_solvers.swapping.plan import Planner

METHODS: Mapping[str, Planner] = {
    "autoswap": autoswap,
    **{f"autoswap-{score}": partial(by_score, score=score) for score in Score},
    "least-recently-used": least_recently_used,
    "longest-reused": longest_reused,
}
"""All planners by name."""
