"""What may be recomputed in a step, and the answer: which operators run again, when, and for whom.

The unit is a storage (an *array*), as everywhere: its *makers* are its producer and the operators of the same
phase that write into it later, and they run again one after the other. An array is dropped after its last
reader of its own phase and made again before the first operator of a later one that reads it; what its makers
read is kept or made again, too. Phases are forward, backward, and what waits for something that all gradients
make together, such as their norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from olla_solvers.problem import Bytes, OperatorIndex, Problem, Timestep

ArrayIndex: TypeAlias = int

Seconds: TypeAlias = float


@dataclass(frozen=True, slots=True)
class Stay:
    """An array's stay elsewhere, between its last reader of its own phase and the first of a later one.

    Attributes:
        array: which.
        gone_before: the position in the order in front of which its memory becomes free; what runs again for
            that position comes afterwards.
        back_from: the position in front of which its memory is needed again.
    """

    array: ArrayIndex
    gone_before: Timestep
    back_from: Timestep


@dataclass(frozen=True)
class RecomputationProblem:
    """A step in an order, and what of it may run again.

    Attributes:
        problem: operators and arrays.
        order: an order of the operators; what runs again is put between them.
        seconds: of each operator.
        makers: for each array the operators that make it again if they run one after the other, in captured
            order and all of one phase; empty if it cannot be made again (a random draw, a static array).
        phases: for each operator the phase that it belongs to: 0 for forward, 1 for backward (and the update,
            if nothing waits for all gradients), and so on. Before it, arrays of earlier phases may be made
            again. What reads an array is of no earlier phase than what makes it.
        must_precede: for operators among the makers, those that a repetition must run before, since they
            write to what it reads.
        takes_over: pairs of arrays (read, made): the one operator that makes the second one may do so in the
            memory of the first if nobody needs that afterwards. Both have the same size.
        again_seconds: of a repetition of each operator; empty if that takes as long as the first run.
        stays: of arrays that are elsewhere for a while, at most one of each. One counts if its array is kept,
            and nothing that runs again reads it meanwhile. They are those of this order: what is proven of a
            problem with any holds for its order alone.
    """

    problem: Problem
    order: tuple[OperatorIndex, ...]
    seconds: tuple[Seconds, ...]
    makers: tuple[tuple[OperatorIndex, ...], ...]
    phases: tuple[int, ...]
    must_precede: Mapping[OperatorIndex, tuple[OperatorIndex, ...]] = field(default_factory=dict)
    takes_over: tuple[tuple[ArrayIndex, ArrayIndex], ...] = ()
    again_seconds: tuple[Seconds, ...] = ()
    stays: tuple[Stay, ...] = ()

    @property
    def repetition_seconds(self) -> tuple[Seconds, ...]:
        """Seconds of a repetition of each operator."""
        return self.again_seconds or self.seconds

    @property
    def step_seconds(self) -> Seconds:
        """Seconds of the step if nothing runs again."""
        return sum(self.seconds)


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of an operator.

    Attributes:
        operator: which.
        copy: 0 for the operator itself, 1 for its first repetition, and so on.
        sources: (operator, copy) for each operator whose results it reads from a repetition; those that are
            not named are read from copy 0. Of an array with several makers, all that were repeated for it
            are named.
    """

    operator: OperatorIndex
    copy: int = 0
    sources: tuple[tuple[OperatorIndex, int], ...] = ()


@dataclass(frozen=True)
class Recomputation:
    """A step with repetitions.

    Attributes:
        executions: in sequence; each operator once as copy 0, in the order that was given.
        peak_bytes: most bytes of planned arrays and workspaces alive at once in this sequence.
        extra_seconds: of the repetitions.
        dropped: the arrays that are made again, ascending.
    """

    executions: tuple[Execution, ...]
    peak_bytes: Bytes
    extra_seconds: Seconds
    dropped: tuple[ArrayIndex, ...]
