"""Plans the same graph again and again with other sizes: the order is kept, the arrays are placed anew.

An order stays executable whatever the sizes. Lifetimes follow from it alone, so that what is left to do for
new sizes is to place (profile-guided allocation §3.2). Only the skylines run, which take milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.analysis import lifetimes, timesteps
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.plan import MemoryPlan, Provenance, SolverReport, Span
from olla_solvers.problem import Bytes, Problem
from olla_solvers.spans import max_live_bytes
from olla_solvers.validate import validate

WASTE = 0.02
"""Of the peak: a placement with less above it is low enough."""


class KeptOrder:
    """One order of a graph, for any sizes.

    Attributes:
        problem: the graph with some sizes.
        order: operator names, first to last.
    """

    def __init__(self, problem: Problem, order: Sequence[str]) -> None:
        """Derive all lifetimes.

        Args:
            problem: the graph.
            order: operator names; executable.
        """
        self.problem = problem
        self.order = tuple(order)
        sequence = problem.indices_of(order)
        alive = lifetimes(problem, sequence)
        self._lifetimes = [(alive[array.name].lower, alive[array.name].upper) for array in problem.planned]
        self._timesteps = timesteps(sequence)
        self._alignment = max((array.alignment for array in problem.planned), default=1)
        self._at_operators: list[list[int]] = [[] for _ in problem.operators]
        for position, array in enumerate(problem.planned):
            for operator in {array.producer, *array.consumers} - {None}:
                self._at_operators[operator or 0].append(position)

    def plan(
        self, array_bytes: Sequence[Bytes], workspace_bytes: Sequence[Bytes]
    ) -> tuple[Problem, MemoryPlan]:
        """Place the arrays and workspaces of some sizes.

        Args:
            array_bytes: of each array, rounded up to its alignment.
            workspace_bytes: of each operator.

        Returns:
            The problem of these sizes, and its plan, which is validated.

        Raises:
            ProblemError: if a size is impossible.
        """
        started = time.monotonic()
        problem = self.problem.resized(array_bytes, workspace_bytes)
        planned = problem.planned
        spans = [
            Span(array.name, lower, upper, array.size_bytes, array.alignment)
            for array, (lower, upper) in zip(planned, self._lifetimes, strict=True)
        ]
        scratching = [(index, size) for index, size in enumerate(workspace_bytes) if size]
        for index, size in scratching:
            first = self._timesteps[index]
            spans.append(Span(problem.operators[index].name, first, first + 1, size, self._alignment))
        peak = max_live_bytes(spans)
        placed = best_of_heuristics(spans, int((1 + WASTE) * peak))
        offsets = placed.offsets
        none = SolverReport("none")
        plan = MemoryPlan(
            order=self.order,
            offsets={array.name: offset for array, offset in zip(planned, offsets, strict=False)},
            workspace_offsets={
                problem.operators[index].name: offset
                for (index, _), offset in zip(scratching, offsets[len(planned) :], strict=True)
            },
            buffer_bytes=placed.height_bytes,
            peak_bytes=peak,
            lower_bound_bytes=self._lower_bound(problem),
            provenance=Provenance("kept from other sizes", None, none, placed.method, None, none),
            timings={"place": time.monotonic() - started},
        )
        validate(problem, plan)
        return problem, plan

    def _lower_bound(self, problem: Problem) -> Bytes:
        """Return the most bytes that one operator touches, which are alive at once in every order."""
        sizes = [array.size_bytes for array in problem.planned]
        touched = (
            sum(sizes[position] for position in positions) + operator.workspace_bytes
            for operator, positions in zip(problem.operators, self._at_operators, strict=True)
        )
        return max(touched, default=0)
