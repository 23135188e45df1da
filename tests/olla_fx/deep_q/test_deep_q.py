from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from olla_fx.deep_q import QNetwork, Settings, learn, load_network, plan_by_learning, save_network
from olla_fx.deep_q.network import Graph
from olla_solvers.errors import OptionError
from olla_solvers.swapping.environment.environment import Environment
from olla_solvers.swapping.transfers import Link
from tests.olla_solvers.recomputation.steps import chain, random_step

LINK = Link(10.0, 10.0)
QUICK = Settings(episodes=60, batch=8, updates=0.5)


def best_of_all_games(environment: Environment) -> float:
    """Play every game, and return the least that a won one adds to the step's time."""
    best, histories = float("inf"), [[]]
    while histories:
        history = histories.pop()
        observation = environment.reset()
        for choice in history:
            observation, _ = environment.step(choice)
        if observation.is_over and environment.is_won:
            best = min(best, environment.extra_seconds)
        histories += [[*history, choice] for choice in observation.choices]
    return best


@pytest.mark.parametrize(
    ("layers", "seconds", "limit", "link"),
    [
        # All layers are equal; half of them have the time to wait on the host.
        (5, (1.0,), 40, LINK),
        # What takes long is copied, what is fast is made again, since the link is slow.
        (4, (0.5, 8.0, 0.5, 8.0), 30, Link(5.0, 5.0)),
        # A link that is too slow: everything is made again.
        (5, (1.0,), 40, Link(0.5, 0.5)),
    ],
)
def test_the_best_actions_are_found(layers, seconds, limit, link):
    problem = chain(layers, seconds)
    environment = Environment(problem, limit, link)
    best = best_of_all_games(environment)
    learned = plan_by_learning(problem, limit, link, settings=QUICK)
    assert learned.is_met
    assert learned.plan.extra_seconds == pytest.approx(best)


def test_learning_is_better_than_chance():
    """The last games of many cost less than the first, random ones."""
    problem = chain(4, (0.5, 8.0, 0.5, 8.0))
    learned = learn([Environment(problem, 30, Link(5.0, 5.0))], Settings(episodes=80, updates=2))
    first, last = learned.returns[:20], learned.returns[-20:]
    assert sum(last) > sum(first) * 0.6


def test_the_network_computes_the_papers_equations():
    """Node by node and edge by edge, as equations 1 to 3 are written, but for the mean."""
    environment = Environment(random_step(11, 9).problem, 5, LINK, least_share=0.0)
    network, graph = QNetwork(5, 4, seed=1), Graph.of(environment)
    observation = environment.observation
    features = graph.features.clone()
    features[:, 5] = graph.validity([observation])[:, 0]
    count, edges = len(features), environment.edges
    neighbours = [
        [(other, edges[min(node, other), max(node, other)]) for other in range(count)
         if (min(node, other), max(node, other)) in edges]
        for node in range(count)
    ]  # fmt: skip
    states = [torch.zeros(5) for _ in range(count)]
    for _ in range(4):
        states = [
            torch.relu(
                network.w1 @ features[node]
                + network.w2 @ (states[node] + sum(states[other] for other, _ in neighbours[node]))
                + network.w3
                @ sum(
                    (torch.relu(network.w4[:, 0] * weight) for _, weight in neighbours[node]), torch.zeros(5)
                )
            )
            for node in range(count)
        ]
    whole = torch.cat([network.w5 @ torch.stack(states).mean(0), network.w6 @ states[observation.node]])
    asked = list(range(count))
    (values,) = network(graph, [observation], [asked])
    for node in asked:
        expected = network.w7 @ torch.relu(torch.cat([whole, network.w8 @ states[node]]))
        assert values[node].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("lookahead", [0.0, 0.5, 1.0])
def test_plans_are_the_same_for_the_same_seed(lookahead):
    problem = chain(7, (1.0, 3.0))
    settings = Settings(episodes=15, lookahead=lookahead, seed=4)
    first, second = (plan_by_learning(problem, 40, LINK, settings=settings) for _ in range(2))
    assert first.plan == second.plan
    assert first.returns == second.returns
    weights = zip(first.network.parameters(), second.network.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    other = plan_by_learning(problem, 40, LINK, settings=Settings(episodes=15, lookahead=lookahead, seed=5))
    assert other.returns != first.returns


def test_what_was_learned_is_kept(tmp_path):
    network = learn([Environment(chain(5), 30, LINK)], Settings(episodes=5, width=7, rounds=3)).network
    save_network(network, tmp_path / "network.safetensors")
    again = load_network(tmp_path / "network.safetensors")
    assert (again.width, again.rounds) == (7, 3)
    weights = zip(network.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    with pytest.raises(FileNotFoundError, match="no file"):
        load_network(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("no network")
    with pytest.raises(OptionError, match="holds no network"):
        load_network(tmp_path / "text")


def test_without_safetensors_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install 'olla-fx\[learning\]'"):
        save_network(QNetwork(2, 2), tmp_path / "network.safetensors")
    with pytest.raises(OptionError, match="pip install"):
        load_network(tmp_path / "network.safetensors")


def test_what_was_learned_on_a_small_step_serves_a_larger_one():
    """Layers that take long are to be copied, fast ones to be made again; more of them change nothing."""
    seconds = (0.5, 8.0, 0.5, 8.0)
    small = learn([Environment(chain(6, seconds), 40, Link(5.0, 5.0))], Settings(episodes=80, updates=0.5))
    problem, limit, link = chain(16, seconds), 110, Link(5.0, 5.0)
    once = Settings(episodes=1, random_games=0, updates=0)
    as_it_is = plan_by_learning(problem, limit, link, network=small.network, settings=once)
    untaught = [
        plan_by_learning(problem, limit, link, network=QNetwork(seed=seed), settings=once).plan
        for seed in range(4)
    ]
    assert as_it_is.is_met
    assert as_it_is.plan.extra_seconds < sum(plan.extra_seconds for plan in untaught) / 4


def test_a_time_limit_is_kept():
    problem = chain(40, (1.0, 2.0))
    began = time.monotonic()
    learned = plan_by_learning(problem, 200, LINK, settings=Settings(episodes=10**6), time_limit=1.0)
    assert time.monotonic() - began < 6
    assert learned.plan.peak_bytes <= problem.problem.arrays[0].size_bytes * 41
    assert learned.seconds < 6


def test_a_limit_that_cannot_be_met_gives_the_smallest_peak():
    learned = plan_by_learning(chain(6), 25, LINK, settings=Settings(episodes=4))
    assert not learned.is_met
    assert learned.plan.peak_bytes < 70


def test_a_limit_that_is_met_anyway_needs_no_learning():
    learned = plan_by_learning(chain(3), 1000, LINK)
    assert learned.is_met
    assert learned.returns == ()
    assert learned.network is None


def test_swapping_alone_makes_nothing_again():
    learned = plan_by_learning(chain(6), 40, LINK, recompute=False, settings=Settings(episodes=10))
    assert learned.is_met
    assert learned.plan.recomputation.dropped == ()
    assert learned.plan.transfers


@pytest.mark.parametrize(
    "given", [{"episodes": 0}, {"batch": 0}, {"updates": -1}, {"decay": 1.5}, {"lookahead": 2}, {"rate": 0}]
)
def test_settings_that_make_no_sense_are_errors(given):
    with pytest.raises(OptionError, match="nothing can be learned"):
        Settings(**given)


@pytest.mark.parametrize("time_limit", [0, -1.0])
def test_no_time_is_an_error(time_limit):
    with pytest.raises(OptionError, match="takes some time"):
        plan_by_learning(chain(3), 10, LINK, time_limit=time_limit)
