"""Changes random units again and again, and keeps what is better, or seldom what is a little worse.

Simulated annealing (Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983) of the
seconds of all repetitions, and the bytes beyond the budget at a price that rises while the budget is not met
and falls while it is. One unit gets another state, or two get each other's. It matters where memory is so low
that what is made again stands in the way of the rest. Written for plain Python and numba alike, as
:mod:`olla_solvers.recomputation.walk` is; the random numbers are its own, so that both find the same.
"""

from __future__ import annotations

from olla_solvers.recomputation.instance import Flat, Numbers
from olla_solvers.recomputation.walk import Trace, excess, walk

PRICE_CHANGE = 1.02
"""Factor of the price of a byte from one try to the next."""

HOT, COLD = 3e-3, 1e-5
"""Share of the step's seconds by which a change may be worse, in the beginning and in the end."""

STATES = 4
"""Number of states that a unit can have."""


def anneal(
    flat: Flat,
    states: Numbers,
    best: Numbers,
    trace: Trace,
    budget_bytes: int,
    step_seconds: float,
    tries: int,
    seed: int,
) -> float:
    """Search states within a budget, from some that may be beyond it.

    Args:
        flat: the step.
        states: where to begin; changed.
        best: takes the fastest states within the budget.
        trace: for the walks.
        budget_bytes: the peak that may not be passed.
        step_seconds: of the step without repetitions.
        tries: walks to make.
        seed: of the random numbers.

    Returns:
        The seconds of the best states; negative if none was within the budget.
    """
    units = len(states)
    timesteps, _, seconds = walk(flat, states, trace)
    beyond = excess(trace, timesteps, budget_bytes)
    price = step_seconds / (float(max(1, budget_bytes)) * len(flat.order))
    best_seconds = -1.0
    if beyond == 0.0:
        best_seconds = seconds
        copy(states, best)
    random = seed % 2147483646 + 1
    for turn in range(tries):
        random = random * 48271 % 2147483647
        unit = random % units
        random = random * 48271 % 2147483647
        other = random % units
        before, other_before = states[unit], states[other]
        if turn % 2 == 0 or before == other_before:
            random = random * 48271 % 2147483647
            other = unit
            states[unit] = (before + 1 + random % (STATES - 1)) % STATES
        else:
            states[unit] = other_before
            states[other] = before
        timesteps, _, changed_seconds = walk(flat, states, trace)
        is_taken = False
        if timesteps >= 0:
            changed_beyond = excess(trace, timesteps, budget_bytes)
            worse = changed_seconds - seconds + price * (changed_beyond - beyond)
            random = random * 48271 % 2147483647
            # Threshold accepting with a random threshold: no exponential is needed, and none rounds.
            heat = step_seconds * (HOT + (COLD - HOT) * turn / tries)
            is_taken = worse <= heat * (random / 2147483647.0) ** 4
            if is_taken:
                seconds, beyond = changed_seconds, changed_beyond
                if beyond == 0.0 and (best_seconds < 0.0 or seconds < best_seconds):
                    best_seconds = seconds
                    copy(states, best)
        if not is_taken:
            states[other] = states[other] if other == unit else other_before
            states[unit] = before
        price = price * PRICE_CHANGE if beyond > 0.0 else price / PRICE_CHANGE
    return best_seconds


def copy(states: Numbers, to: Numbers) -> None:
    """Copy states, one by one, since numba would allocate memory for slices."""
    for unit in range(len(states)):
        to[unit] = states[unit]
