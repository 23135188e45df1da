import itertools
import random
from dataclasses import replace

import pytest

from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_time import least_time
from olla_solvers.recomputation.problem import RecomputationProblem, Stay
from tests.olla_solvers.recomputation.simulate import Simulation
from tests.olla_solvers.recomputation.steps import Step, chain, random_step


def with_stays(step: Step, draw: random.Random) -> RecomputationProblem:
    """The step's problem, with a stay of every other array that is kept."""
    problem = step.problem
    position = {operator: place for place, operator in enumerate(problem.order)}
    stays = []
    for index, array in enumerate(problem.problem.arrays):
        if array.producer is None or draw.random() < 0.5:
            continue
        phase = problem.phases[array.producer]
        late = [position[each] for each in array.consumers if problem.phases[each] > phase]
        early = [position[each] for each in array.consumers if problem.phases[each] == phase]
        first = max([position[array.producer], *early]) + 1
        if late and first < min(late):
            stays.append(Stay(index, *sorted(draw.sample(range(first, min(late) + 1), 2))))
    return replace(problem, stays=tuple(stays))


def check_seeds(seeds: range) -> tuple[int, int]:
    """Compare walks with a simulation; return how many stays counted, and how many did not."""
    counted = ignored = 0
    for seed in seeds:
        draw = random.Random(seed)
        step = random_step(seed, 10)
        problem = with_stays(step, draw)
        evaluator = Evaluator(prepare(problem))
        units = len(evaluator.instance.units.arrays)
        for states in itertools.islice(itertools.product(range(4), repeat=units), 40):
            if not evaluator.evaluate(states).is_valid:
                continue
            answer = evaluator.recomputation(states)
            simulation = Simulation(step)
            simulation.run(answer.executions)
            resident = simulation.resident(answer.executions)
            own = [at for at, execution in enumerate(answer.executions) if not execution.copy]
            began = [0, *(at + 1 for at in own)]
            for stay in problem.stays:
                gone, back = began[stay.gone_before], began[stay.back_from]
                uses = simulation.uses[stay.array, 0]
                if uses[-1] < back or any(gone <= use < back for use in uses):
                    ignored += 1
                    continue
                counted += 1
                for timestep in range(gone, back):
                    resident[timestep] -= simulation.bytes_of((stay.array, 0))
            assert answer.peak_bytes == max(resident, default=0)
    return counted, ignored


def test_walks_count_what_is_elsewhere():
    counted, ignored = check_seeds(range(300))
    assert counted > 500
    assert ignored > 100


@pytest.mark.slow
def test_thousands_of_walks_count_what_is_elsewhere():
    check_seeds(range(300, 4000))


def test_no_states_are_below_the_bound_of_an_order_with_stays():
    proven = 0
    for seed in range(10):
        draw = random.Random(seed)
        problem = chain(7, (1.0, 3.0, 2.0))
        stays = (Stay(array, draw.randint(array + 2, 6), draw.randint(7, 12 - array)) for array in range(5))
        problem = replace(problem, stays=tuple(draw.sample(list(stays), 3)))
        evaluator = Evaluator(prepare(problem))
        walks = [evaluator.evaluate(states) for states in itertools.product(range(2), repeat=7)]
        for budget in sorted({walk.peak_bytes for walk in walks if walk.is_valid}):
            bound = lower_bound(problem, budget)
            within = [walk.extra_seconds for walk in walks if walk.is_valid and walk.peak_bytes <= budget]
            assert bound.extra_seconds <= min(within) + 1e-9
            proven += bound.extra_seconds > 0
    assert proven > 10


def test_what_is_elsewhere_need_not_be_made_again():
    problem = chain(40)
    budget = 300
    alone = least_time(problem, budget)
    # The first ten results are elsewhere from the middle of forward to the end of backward.
    stays = tuple(Stay(array, 20, 79 - array) for array in range(10))
    answer = least_time(replace(problem, stays=stays), budget)
    assert alone.is_met
    assert answer.is_met
    assert answer.recomputation.extra_seconds < alone.recomputation.extra_seconds
    assert answer.bound.extra_seconds <= answer.recomputation.extra_seconds
    assert not {stay.array for stay in stays} & set(answer.recomputation.dropped)
