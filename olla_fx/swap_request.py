"""How a step is to swap: over which link, and who chooses what waits on the host, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from olla_solvers.problem import OperatorIndex, Problem
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.swapping.transfers import Link, Transfer


@dataclass(frozen=True)
class SwapProblem:
    """A step in the sequence in which it runs, of which some arrays may wait on the host.

    Attributes:
        problem: operators and arrays; repetitions that recomputation has chosen are operators like others.
        order: the sequence, whose positions are the timesteps of transfers.
        seconds: of each operator, by index.
        may_wait: the arrays that may wait on the host.
        link: which copies.
    """

    problem: Problem
    order: tuple[OperatorIndex, ...]
    seconds: tuple[Seconds, ...]
    may_wait: frozenset[ArrayIndex]
    link: Link


ChooseTransfers: TypeAlias = Callable[[SwapProblem], Sequence[Transfer]]
"""Chooses what waits on the host, and when: within one step, ``copy`` 0, and only arrays that may."""


@dataclass(frozen=True)
class SwapRequest:
    """Asks for a step whose arrays wait on the host.

    Attributes:
        choose: says which, of the step in the order in which it will run.
        link: which copies. On a CPU, where nothing is gained, copies are made as slow as it says.
    """

    choose: ChooseTransfers
    link: Link
