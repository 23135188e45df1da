"""The least seconds of a step that may swap, by trying every choice, with nothing but the simulator."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.evaluate import Evaluator
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import Execution
from olla_solvers.swapping.simulate import simulate_settled
from olla_solvers.swapping.transfers import Link, Transfer
from tests.olla_solvers.recomputation.simulate import Simulation
from tests.olla_solvers.recomputation.steps import Step

Accesses = dict[tuple[int, int], list[int]]


def resident(step: Step, executions: Sequence[Execution]) -> tuple[list[int], Accesses]:
    """Bytes at each timestep without swapping, and the timesteps at which each version is accessed."""
    simulation = Simulation(step)
    simulation.run(executions)
    return simulation.resident(executions), simulation.uses


def sequences(step: Step) -> Iterator[tuple[tuple[Execution, ...], float]]:
    """Every sequence that states of the evaluator stand for, with the seconds of its repetitions."""
    evaluator = Evaluator(prepare(step.problem))
    seen = set()
    for states in itertools.product(range(4), repeat=len(evaluator.instance.units.arrays)):
        if evaluator.evaluate(states).is_valid:
            answer = evaluator.recomputation(states)
            if answer.executions not in seen:
                seen.add(answer.executions)
                yield answer.executions, answer.extra_seconds


def transfers_of(step: Step, accesses: Accesses, length: int) -> list[list[Transfer]]:
    """For each gap between two accesses of what operators made first, or is lent: every way to swap there."""
    problem = step.problem
    arrays = problem.problem.arrays
    result = []
    for (array, copy), timesteps in sorted(accesses.items()):
        may_wait = arrays[array].kind is ArrayKind.PLANNED or array in problem.lent
        if copy or not may_wait or not arrays[array].size_bytes:
            continue
        distinct = sorted(set(timesteps))
        if array in problem.lent - problem.renewed:
            distinct.append(distinct[0] + length)
        for before, after in itertools.pairwise(distinct):
            places = itertools.combinations(range(before + 1, after + 1), 2)
            ways = [Transfer(before, gone, back, after, array) for gone, back in places]
            if ways:
                result.append(ways)
    return result


def sequences_of_copies(transfers: Sequence[Transfer], length: int) -> Iterator[Sequence[Transfer]]:
    """All sequences of transfers that differ: of copies that are asked for at once the first comes first."""
    outs = {transfer.out_after for transfer in transfers}
    ins = {transfer.back_from % length for transfer in transfers}
    is_decided = len(outs) + len(ins) == 2 * len(transfers)
    return iter([transfers]) if is_decided else itertools.permutations(transfers)


def least_seconds(step: Step, budget: int, link: Link, most: int = 6000) -> float | None:
    """The least seconds of a step within a budget; infinite if there is no way, None if there are too many.

    Args:
        step: small.
        budget: bytes.
        link: which copies.
        most: ways to try for one sequence.
    """
    arrays = step.problem.problem.arrays
    own = step.problem.seconds
    best = math.inf
    for executions, extra in sorted(sequences(step), key=operator.itemgetter(1)):
        if sum(own) + extra >= best:
            break
        there, accesses = resident(step, executions)
        seconds = [own[execution.operator] for execution in executions]
        length = len(executions)
        gaps = transfers_of(step, accesses, length)
        if math.prod(len(ways) + 1 for ways in gaps) > most:
            return None
        for chosen in itertools.product(*([None, *ways] for ways in gaps)):
            transfers = [transfer for transfer in chosen if transfer]
            left = list(there)
            for transfer in transfers:
                for timestep in range(transfer.gone_before, transfer.back_from):
                    left[timestep % length] -= arrays[transfer.array].size_bytes
            if max(left) > budget:
                continue
            for ordered in sequences_of_copies(transfers, length):
                sizes = [arrays[transfer.array].size_bytes for transfer in ordered]
                best = min(best, simulate_settled(seconds, ordered, sizes, link).seconds)
            if best <= sum(own) + extra:
                break
    return best
