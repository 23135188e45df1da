from __future__ import annotations

import pytest
import torch
from kmeans import kmeans

import olla_fx
from olla_fx.errors import RecordingError
from olla_solvers.problem import ArrayKind
from olla_solvers.swapping.environment.environment import Environment
from olla_solvers.swapping.transfers import Link


def test_operators_and_their_accesses_are_recorded():
    given = torch.ones(8, 8)
    with olla_fx.record(operators=True) as recording:
        product = given @ given
        half = product[:4]
        half.add_(1)
        total = half.sum()
        del product, half
        other = total * 2
    program = recording.program
    assert [item.name for item in program.operators] == ["mm", "add_", "sum", "mul"]
    assert [(item.reads, item.makes) for item in program.operators] == [
        ((0,), (1,)),
        ((1,), ()),
        ((1,), (2,)),
        ((2,), (3,)),
    ]
    assert program.operators[0].flops == 2 * 8**3
    problem = program.problem(lambda item: item.flops + 1.0)
    assert [array.kind for array in problem.problem.arrays] == [ArrayKind.STATIC, *[ArrayKind.PLANNED] * 3]
    assert problem.seconds == (1025.0, 1.0, 1.0, 1.0)
    assert problem.makers == ((),) * 4
    assert other.item() == 4 * 8 * 9 * 2


def test_a_storage_in_the_place_of_another_one_has_a_number_of_its_own():
    with olla_fx.record(operators=True) as recording:
        for _ in range(20):
            torch.ones(100).sum()
    made = [storage for item in recording.program.operators for storage in item.makes]
    assert made == list(range(40))


def test_k_means_swaps_and_computes_nothing_again():
    with olla_fx.record(operators=True) as recording:
        kmeans(parts=4, points=512, iterations=3)
    problem = recording.program.problem(lambda item: 1e-4)
    link = Link(1e9, 1e9)
    peak = Environment(problem, 0, link).peak_bytes
    environment = Environment(problem, int(0.85 * peak), link)
    observation = environment.observation
    assert not any(action.is_removal for action in environment.actions.values())
    while not observation.is_over:
        observation, _ = environment.step(observation.choices[-1])
    assert environment.is_won
    plan = environment.plan()
    assert plan.peak_bytes <= 0.85 * peak
    assert plan.transfers
    assert plan.recomputation.dropped == ()
    # Between two iterations each part is accessed once: some wait more than once.
    assert {transfer.array for transfer in plan.transfers}


def test_without_operators_there_is_no_program():
    with olla_fx.record() as recording:
        torch.ones(3)
    with pytest.raises(RecordingError, match=r"record\(operators=True\)"):
        _ = recording.program
    with olla_fx.record(operators=True) as recording:
        pass
    with pytest.raises(RecordingError, match="no operator was recorded"):
        recording.program.problem(lambda item: 1.0)
