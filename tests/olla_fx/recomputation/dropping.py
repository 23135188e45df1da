"""Drops random arrays of the steps that are planned, and makes them again: a planner that knows no peak."""

import random
from collections.abc import Collection

import pytest

from olla_fx import compile as pipeline
from olla_fx.capture import CapturedStep
from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.fx_graph import REPEATED
from olla_fx.passes import repeatable, run_passes
from olla_fx.passes.rewrites import Wanted
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputation.problem import recomputation_problem, with_repetitions
from olla_fx.rewriting import Candidate, Rewriting
from olla_solvers.order import order_quickly
from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.problem import Execution, RecomputationProblem


def planning_dataflow(captured: CapturedStep, rewrites: Collection[str] = ()) -> Dataflow:
    """Return the dataflow on which repetitions are planned."""
    probe = Probe(captured.device, True, lambda question, answer: answer())
    wanted = Wanted(rewrites, probe) if rewrites else None
    graph_module = run_passes(captured, wanted, keep_phases=True).graph_module
    return build_dataflow(graph_module, captured.device, pipeline._usual_gradients(captured))


def problem_of(dataflow: Dataflow) -> RecomputationProblem:
    """Return what may run again, in an order of a small peak, if each operator takes a second."""
    order = order_quickly(dataflow.problem, 0.2).order
    return recomputation_problem(dataflow, order, [1.0] * len(order))


class _Walk:
    """Walks an order and makes dropped arrays again before whatever of backward reads them."""

    def __init__(self, problem: RecomputationProblem, dropped: Collection[int], again: float, seed: int):
        self.problem, self.dropped, self.again = problem, set(dropped), again
        self.random = random.Random(seed)
        self.reads: list[list[int]] = [[] for _ in problem.problem.operators]
        for number, array in enumerate(problem.problem.arrays):
            if array.kind is not ArrayKind.STATIC:
                for reader in array.consumers:
                    self.reads[reader].append(number)
        self.group = self._groups()
        self.newest: dict[int, int] = {}
        self.done: set[int] = set()
        self.executions: list[Execution] = []

    def _groups(self) -> dict[int, frozenset[int]]:
        """Return for each array its makers, and those of all arrays with which it shares one."""
        group: dict[int, set[int]] = {}
        for makers in self.problem.makers:
            joined = set(makers).union(*(group.get(operator, ()) for operator in makers))
            group.update(dict.fromkeys(joined, joined))
        arrays = enumerate(self.problem.makers)
        return {array: frozenset(group[makers[0]]) for array, makers in arrays if makers}

    def run(self) -> tuple[Execution, ...]:
        for operator in self.problem.order:
            for array in self._read_anew(operator):
                self._demand(array)
            self._execute(operator, 0)
            self.done.add(operator)
        return self._without_unread()

    def _read_anew(self, operator: int) -> list[int]:
        """Return what an operator reads of earlier phases, and not from the first run itself."""
        phases, arrays = self.problem.phases, self.problem.problem.arrays
        return [
            array
            for array in self.reads[operator]
            if arrays[array].producer is not None and phases[arrays[array].producer] < phases[operator]
        ]

    def _demand(self, array: int) -> None:
        makers = self.group.get(array)
        if array not in self.dropped or not makers or not self._may_run(makers):
            return
        is_made = any(operator in self.newest for operator in makers)
        if is_made and (self.random.random() > self.again or len(self.executions) > 2000):
            return
        for operator in sorted(makers):
            for source in self.reads[operator]:
                if self.group.get(source) != makers:
                    self._demand(source)
        copy = 1 + max(self.newest.get(operator, 0) for operator in makers)
        for operator in sorted(makers):
            self._execute(operator, copy)
            self.newest[operator] = copy

    def _may_run(self, makers: Collection[int]) -> bool:
        """Return False if something that is to be read was overwritten."""
        late = {writer for operator in makers for writer in self.problem.must_precede.get(operator, ())}
        return self.done.isdisjoint(late)

    def _execute(self, operator: int, copy: int) -> None:
        own = next((group for group in self.group.values() if operator in group), frozenset())
        sources: dict[int, int] = {}
        for array in self.reads[operator] if copy else self._read_anew(operator):
            for maker in self.problem.makers[array]:
                number = self.newest.get(maker, 0)
                if number and not (copy and maker in own and number != copy):
                    sources[maker] = number
        self.executions.append(Execution(operator, copy, tuple(sorted(sources.items()))))

    def _without_unread(self) -> tuple[Execution, ...]:
        needed: set[tuple[int, int]] = set()
        kept = []
        for execution in reversed(self.executions):
            if execution.copy == 0 or (execution.operator, execution.copy) in needed:
                kept.append(execution)
                needed.update(execution.sources)
        return tuple(reversed(kept))


def drop(
    problem: RecomputationProblem, dropped: Collection[int], again: float = 0.0, seed: int = 0
) -> tuple[Execution, ...]:
    """Return a sequence in which some arrays are made again.

    Args:
        problem: the step.
        dropped: the arrays.
        again: how likely an array that was made again is made once more for its next reader.
        seed: of the chance.
    """
    return _Walk(problem, dropped, again, seed).run()


def choose_at_random(problem: RecomputationProblem, share: float, seed: int) -> list[int]:
    """Return some of the arrays that can be made again."""
    chance = random.Random(seed)
    return [array for array, makers in enumerate(problem.makers) if makers and chance.random() < share]


class Dropping:
    """Lets all steps be planned with random arrays dropped.

    Attributes:
        repeated: for each graph that was made, the operators that run again, by their targets' names.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repeated: list[list[str]] = []
        self.share, self.again, self.seed = 1.0, 0.0, 0
        monkeypatch.setattr(pipeline, "choose_recomputation", self._choose)
        # Masks of small models are to be drawn again, too.
        monkeypatch.setattr(repeatable, "LEAST_STATES", 0)

    def __call__(self, share: float = 1.0, again: float = 0.0, seed: int = 0) -> None:
        self.share, self.again, self.seed = share, again, seed

    def _choose(self, rewriting: Rewriting, candidate: Candidate, *_: object) -> Candidate:
        kept = rewriting.keeping_phases(candidate).dataflow
        problem = problem_of(kept)
        dropped = choose_at_random(problem, self.share, self.seed)
        step = with_repetitions(kept, drop(problem, dropped, self.again, self.seed))
        step.dataflow.graph_module.graph.lint()
        order = step.dataflow.problem.indices_of(step.order)
        assert step.dataflow.problem.is_executable(order)
        repeated = [str(node.target) for node in step.dataflow.operators if node.meta.get(REPEATED)]
        self.repeated.append(repeated)
        return Candidate(step.dataflow, candidate.changes)
