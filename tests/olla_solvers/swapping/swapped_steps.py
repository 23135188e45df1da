"""Random small steps to swap in, and what a plan must keep."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.problem import Problem
from olla_solvers.swapping.plan import SwapPlan
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link


@st.composite
def timed_steps(draw: st.DrawFn) -> TimedStep:
    """Steps of some operators that run as they are listed, with arrays of all kinds."""
    length = draw(st.integers(2, 12))
    operators = tuple(
        Operator(f"operator {index}", draw(st.sampled_from([0, 0, 0, 5]))) for index in range(length)
    )
    arrays = []
    for index in range(draw(st.integers(1, 10))):
        kind = draw(
            st.sampled_from([ArrayKind.PLANNED, ArrayKind.PLANNED, ArrayKind.STATIC, ArrayKind.OUTPUT])
        )
        producer = None if kind is ArrayKind.STATIC else draw(st.integers(0, length - 1))
        later = range(length) if producer is None else range(producer + 1, length)
        consumers = draw(st.sets(st.sampled_from(later), max_size=4)) if later else set()
        arrays.append(
            Array(f"array {index}", draw(st.integers(0, 40)), producer, tuple(sorted(consumers)), kind)
        )
    renewed = frozenset(
        index for index, array in enumerate(arrays) if array.kind is ArrayKind.STATIC and draw(st.booleans())
    )
    seconds = tuple(float(draw(st.integers(0, 5))) for _ in operators)
    return TimedStep(Problem(operators, tuple(arrays)), tuple(range(length)), seconds, renewed)


links = st.builds(Link, st.sampled_from([1.0, 4.0, 20.0]), st.sampled_from([1.0, 4.0, 20.0]))


def resident_bytes(step: TimedStep, plan: SwapPlan) -> list[int]:
    """The load of each timestep of the third of three equal steps, counted array by array."""
    length = step.length
    loads = []
    for timestep in range(length):
        load = step.problem.operators[step.order[timestep]].workspace_bytes
        for index, array in enumerate(step.problem.arrays):
            accesses = step.accesses[index]
            is_alive = array.kind is ArrayKind.STATIC or (
                accesses[0] <= timestep and (array.kind is ArrayKind.OUTPUT or timestep <= accesses[-1])
            )
            stays = [transfer for transfer in plan.transfers if transfer.array == index]
            is_away = any(
                stay.gone_before <= moment < stay.back_from
                for stay in stays
                for moment in (timestep, timestep + length)
            )
            assert is_alive or not is_away
            load += array.size_bytes if is_alive and not is_away else 0
        loads.append(load)
    return loads


def check(step: TimedStep, plan: SwapPlan) -> None:
    """Check that no array is accessed while it is away, and that the plan counts loads and seconds right."""
    for transfer in plan.transfers:
        array = step.problem.arrays[transfer.array]
        assert array.kind is not ArrayKind.OUTPUT
        accesses = step.accesses[transfer.array]
        moments = {*accesses, *(access + step.length for access in accesses)}
        assert not moments & set(range(transfer.out_after + 1, transfer.back_before))
        assert transfer.back_before in moments
        is_wrapped = transfer.back_before >= step.length
        assert not is_wrapped or (array.kind is ArrayKind.STATIC and transfer.array not in step.renewed)
    for index in range(len(step.problem.arrays)):
        stays = sorted(transfer for transfer in plan.transfers if transfer.array == index)
        for stay, following in itertools.pairwise(stays):
            assert stay.back_before <= following.out_after + 1
        if stays:
            assert stays[-1].back_before <= stays[0].out_after + step.length + 1
    assert list(plan.load_bytes) == resident_bytes(step, plan)
    assert plan.extra_seconds >= 0
    assert abs(plan.simulation.seconds - sum(step.seconds) - plan.extra_seconds) < 1e-6


def network_step(layers: int) -> TimedStep:
    """A training step: activations that grow smaller, weights that grow, their gradients and momenta."""
    forward, length = range(layers), 4 * layers
    arrays = []
    for index in forward:
        back = 2 * layers - 1 - index
        update = 2 * layers + 2 * index
        readers = {index + 1, back} - {index}
        arrays += [
            Array(f"x{index}", 10 * (layers - index) + 3 * (index % 3), index, tuple(sorted(readers))),
            Array(f"dw{index}", 2 + index, back, (update, update + 1)),
            Array(f"w{index}", 2 + index, None, (index, back, update + 1), ArrayKind.STATIC),
            Array(f"m{index}", 2 + index, None, (update, update + 1), ArrayKind.STATIC),
        ]
    operators = tuple(Operator(f"operator {index}") for index in range(length))
    seconds = tuple(3.0 + index % 4 if index < 2 * layers else 0.5 for index in range(length))
    return TimedStep(Problem(operators, tuple(arrays)), tuple(range(length)), seconds)
