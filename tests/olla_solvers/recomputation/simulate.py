"""Runs an answer with made-up contents, independent of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.problem import Execution, Recomputation
from tests.olla_solvers.recomputation.steps import Step

Version = tuple[int, int]


class Simulation:
    """Contents are nested tuples that say what was computed from what."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.arrays = step.problem.problem.arrays
        self.contents: dict[Version, Any] = {
            (index, 0): ("given", index)
            for index, array in enumerate(self.arrays)
            if array.kind is ArrayKind.STATIC
        }
        self.uses: dict[Version, list[int]] = {}
        self.taken: list[list[tuple[Version, Version]]] = []

    def read_of(self, execution: Execution) -> list[tuple[Version, Any]]:
        kernel = self.step.kernels[execution.operator]
        sources = dict(execution.sources)
        assert len(sources) == len(execution.sources)
        result = []
        for array in sorted(kernel.reads):
            producer = self.arrays[array].producer
            copy = 0 if producer is None else sources.get(producer, 0)
            if copy:
                makers = set(self.step.problem.makers[array])
                assert makers, "read from a repetition of what is not made again"
                named = {maker for maker in makers if maker in sources}
                assert named == {maker for maker in makers if (maker, sources.get(maker)) in self.ran} - {
                    execution.operator
                }
            version = (array, copy)
            assert version in self.contents, f"{execution} reads {version}, which does not exist"
            result.append((version, self.contents[version]))
        return result

    def run(self, executions: Sequence[Execution]) -> list[list[Any]]:
        """Return what each execution read."""
        self.ran: set[tuple[int, int]] = set()
        seen = []
        for timestep, execution in enumerate(executions):
            key = (execution.operator, execution.copy)
            assert key not in self.ran
            kernel = self.step.kernels[execution.operator]
            read = self.read_of(execution)
            values = [value for _, value in read]
            seen.append(values)
            versions = {version[0]: version for version, _ in read}
            for place, array in enumerate(kernel.makes):
                made = (array, execution.copy)
                self.contents[made] = ("made", execution.operator, place, tuple(values))
                self.uses[made] = [timestep]
            for array in kernel.writes:
                self.contents[versions[array]] = ("written", execution.operator, tuple(values))
            for version in versions.values():
                self.uses.setdefault(version, []).append(timestep)
            self.taken.append(
                [
                    (versions[old], (new, execution.copy))
                    for old, new in self.step.problem.takes_over
                    if old in versions and new in kernel.makes
                ]
            )
            self.ran.add(key)
        return seen

    def resident(self, executions: Sequence[Execution]) -> list[int]:
        """Return the bytes at each timestep."""
        result = []
        given: set[Version] = set()
        got: set[Version] = set()
        for timestep, execution in enumerate(executions):
            total = self.step.problem.problem.operators[execution.operator].workspace_bytes
            total += self.step.problem.lent_bytes
            for version, uses in self.uses.items():
                if uses[0] <= timestep <= uses[-1]:
                    total += self.bytes_of(version)
            for old, new in self.taken[timestep]:
                if self.uses[old][-1] == timestep and old not in given and new not in got:
                    given.add(old)
                    got.add(new)
                    total -= self.bytes_of(old)
            result.append(total)
        return result

    def bytes_of(self, version: Version) -> int:
        array = self.arrays[version[0]]
        return array.size_bytes if array.kind is ArrayKind.PLANNED or version[1] else 0


def check_answer(step: Step, answer: Recomputation) -> None:
    """Check that an answer computes what the step does, and that its numbers are true."""
    problem = step.problem
    plain = [Execution(operator) for operator in problem.order]
    expected = dict(zip(problem.order, Simulation(step).run(plain), strict=True))
    simulation = Simulation(step)
    seen = simulation.run(answer.executions)
    for execution, values in zip(answer.executions, seen, strict=True):
        assert values == expected[execution.operator], f"{execution} reads something else"
    assert tuple(each.operator for each in answer.executions if not each.copy) == problem.order
    repetitions = [each.operator for each in answer.executions if each.copy]
    assert set(repetitions) <= {maker for makers in problem.makers for maker in makers}
    assert answer.peak_bytes == max(simulation.resident(answer.executions), default=0)
    assert abs(answer.extra_seconds - sum(problem.seconds[operator] for operator in repetitions)) < 1e-9
