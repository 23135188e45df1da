from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.errors import OptionError
from olla_solvers.swapping.environment.actions import NOTHING
from olla_solvers.swapping.environment.environment import Environment
from olla_solvers.swapping.environment.operations import OperationKind
from olla_solvers.swapping.environment.timetable import least_bytes, timetable
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, away_bytes, check
from tests.olla_solvers.recomputation.simulate import Simulation, check_answer
from tests.olla_solvers.recomputation.steps import chain, random_step

FAST, SLOW = Link(1000.0, 1000.0), Link(2.0, 2.0)


def test_the_nodes_are_the_operations_on_memory_in_sequence():
    environment = Environment(chain(2), 1000, FAST)
    kinds = [(operation.kind, operation.array) for operation in environment.operations]
    request, read, write, free = list(OperationKind)[1:]
    assert kinds == [
        (OperationKind.BEGIN, -1),
        *[(request, 0), (write, 0)],
        *[(request, 1), (read, 0), (write, 1)],
        *[(request, 2), (read, 1), (write, 2), (free, 1)],
        *[(read, 0), (read, 2), (free, 0), (free, 2)],
    ]
    assert [operation.begin_seconds for operation in environment.operations][-2:] == [4.0, 4.0]
    edges = environment.edges
    assert (1, 2) in edges
    assert (1, 12) in edges  # Both of array 0.
    assert (1, 5) not in edges


def test_no_node_stands_for_two_actions():
    for seed in range(100):
        environment = Environment(random_step(seed, 9).problem, 0, FAST, least_share=0.0)
        assert NOTHING not in environment.actions
        rows = environment.features
        for node, action in environment.actions.items():
            kind = environment.operations[node].kind
            assert (kind is OperationKind.MALLOC) == action.is_removal == (rows[node, 4] == -1)


def test_what_fits_needs_nothing():
    environment = Environment(chain(4), 1000, FAST)
    assert environment.observation.is_over
    assert environment.is_won
    assert environment.plan().extra_seconds == 0.0


def test_the_player_goes_on_to_the_first_node_behind_the_copy():
    """As in figure 4: operators take a second, and copying takes 1.5."""
    problem = chain(6)
    environment = Environment(problem, 40, Link(10 / 1.5, 10 / 1.5))
    observation = environment.observation
    assert environment.operations[observation.node].array == 0
    (copy,) = (node for node in observation.choices if node in environment.actions)
    assert not environment.actions[copy].is_removal
    environment.step(NOTHING)
    choices = environment.observation.choices
    copies = [node for node in choices if node and not environment.actions[node].is_removal]
    observation, reward = environment.step(copies[0])
    # It begins when operator 1 has run, ends at 3.5 s, and the next node begins at 4 s: behind operator 3.
    assert environment.operations[observation.node].last_run == 3
    assert reward == 0.0


def test_an_operator_that_does_not_fit_is_not_passed():
    """An extra check: the next operator waits for the copy."""
    environment = Environment(chain(4), 20, Link(1.0, 1000.0))
    while environment.observation.choices[:1] == (NOTHING,):
        environment.step(NOTHING)
    assert environment.operations[environment.observation.node].last_run == 1
    observation, reward = environment.step(
        next(node for node in environment.observation.choices if not environment.actions[node].is_removal)
    )
    assert environment.operations[observation.node].last_run == 2
    # It takes ten seconds from 2 s on. What has been done needs 40 bytes, so operator 4 would wait for it.
    assert reward == -8.0


@pytest.mark.parametrize("recompute", [True, False])
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0.3, 1.0),
    link=st.sampled_from([FAST, SLOW, Link(5.0, 1.0, 0.5)]),
)
def test_a_game_and_its_plan_agree(recompute, seed, share, link):
    step = random_step(seed, 10)
    unlimited = Environment(step.problem, 2**60, link, least_share=0.0)
    limit = int(share * unlimited.peak_bytes)
    environment = Environment(step.problem, limit, link, recompute=recompute, least_share=0.0)
    draw, total, observation = random.Random(seed), 0.0, environment.observation
    moves = 0
    while not observation.is_over:
        assert observation.choices
        node = observation.node
        observation, reward = environment.step(draw.choice(observation.choices))
        assert observation.node >= node
        total, moves = total + reward, moves + 1
        assert moves <= len(environment.operations) + len(environment.actions)
    plan = environment.plan()
    check_answer(step, plan.recomputation)
    check(plan.transfers, len(plan.recomputation.executions))
    sizes = [step.problem.problem.arrays[transfer.array].size_bytes for transfer in plan.transfers]
    away = away_bytes(plan.transfers, sizes, len(plan.recomputation.executions))
    simulation = Simulation(step)
    simulation.run(plan.recomputation.executions)
    resident = simulation.resident(plan.recomputation.executions)
    assert plan.peak_bytes == max(all_ - gone for all_, gone in zip(resident, away, strict=True))
    for transfer in plan.transfers:
        uses = simulation.uses[transfer.array, 0]
        assert not any(transfer.out_after < use < transfer.back_before for use in uses)
        assert transfer.back_before in uses
    if environment.is_won:
        assert plan.peak_bytes <= limit
        assert total == pytest.approx(-plan.extra_seconds)
    elif moves:
        assert total < -plan.extra_seconds - step.problem.step_seconds / 2
    assert recompute or not plan.recomputation.dropped


def test_the_same_choices_lead_to_the_same_end_again():
    environment = Environment(chain(8), 40, SLOW)
    ends = []
    for _ in range(2):
        observation, rewards = environment.reset(), []
        while not observation.is_over:
            observation, reward = environment.step(observation.choices[-1])
            rewards.append(reward)
        ends.append((rewards, environment.plan()))
    assert ends[0] == ends[1]


def test_what_was_copied_is_not_removed():
    environment = Environment(chain(5), 20, FAST)
    observation = environment.observation
    while not observation.is_over:
        observation, _ = environment.step(observation.choices[-1])
        for done, node in itertools.product(observation.done, observation.choices):
            before, now = environment.actions[done], environment.actions.get(node)
            if now is not None and before.is_removal != now.is_removal:
                assert set(before.arrays).isdisjoint(now.arrays)


def test_copies_in_come_early_if_they_fit():
    """Fifty bytes are beside the array until timestep 4."""
    resident = np.array([50, 60, 60, 60, 30, 30, 30, 30])
    stay = Gap(out_after=0, back_before=7, array=0, size_bytes=10)
    # With room enough it comes back right after it has gone; it needs no such trip then.
    for limit, back in ((60, 3), (50, 4)):
        table = timetable([1.0] * 8, resident, [stay], Link(10.0, 10.0), limit)
        (transfer,) = table.transfers
        assert transfer.back_from == back
    assert least_bytes(resident, [stay]).tolist() == [50, 50, 50, 50, 20, 20, 20, 30]


def test_the_timetable_is_the_simulators():
    draw = random.Random(3)
    for _ in range(300):
        length = draw.randint(4, 12)
        seconds = [float(draw.randint(0, 4)) for _ in range(length)]
        stays = []
        resident = np.array([draw.randint(0, 20) for _ in range(length)])
        for array in range(draw.randint(1, 5)):
            out, needed = sorted(draw.sample(range(length), 2))
            if needed > out + 1:
                size = draw.randint(1, 9)
                stays.append(Gap(out, needed, array, size))
                resident[out : needed + 1] += size
        limit = draw.randint(0, int(resident.max()))
        link = Link(draw.choice((1.0, 3.0)), draw.choice((1.0, 3.0)))
        table = timetable(seconds, resident, stays, link, limit)
        by_need = sorted(stays, key=lambda gap: (gap.back_before, gap.array, gap.out_after))
        sizes = [gap.size_bytes for gap in by_need]
        simulation = simulate(seconds, table.transfers, sizes, link)
        assert table.seconds == pytest.approx(simulation.seconds)
        assert table.out_ends == pytest.approx([end for _, end in simulation.out_spans])
        used = resident - np.array(away_bytes(table.transfers, sizes, length))
        assert used.max() <= max(limit, least_bytes(resident, stays).max())


def test_wrong_limits_and_choices_are_errors():
    with pytest.raises(OptionError, match="below 0"):
        Environment(chain(3), -1, FAST)
    environment = Environment(chain(4), 30, FAST)
    with pytest.raises(OptionError, match="node 10000 stands for nothing"):
        environment.step(10000)
