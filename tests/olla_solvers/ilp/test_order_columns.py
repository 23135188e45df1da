"""The timesteps that have columns, against every order of small problems: equations 10 to 12."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp.order_columns import windows
from olla_solvers.ilp.techniques import ALL_TECHNIQUES
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import problems


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(5))
def test_ranges_hold_in_every_order(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    ranges = windows(flow, ALL_TECHNIQUES)
    for order in itertools.permutations(range(flow.count)):
        if not flow.is_executable(order):
            continue
        timestep = {operator: order.index(operator) for operator in order}
        assert all(timestep[operator] in span for operator, span in enumerate(ranges.runs))
        for array, useful, surely in zip(flow.arrays, ranges.useful, ranges.surely, strict=True):
            last = max(timestep[reader] for reader in array.consumers)
            preserved = set(range(timestep[array.producer] + 1, last + 1))
            assert preserved <= set(range(useful.lower, useful.upper))
            assert preserved >= set(range(surely.lower, surely.upper))
