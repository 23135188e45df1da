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

from olla_solvers.errors import ProblemError
from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex, Problem, Timestep

ArrayIndex: TypeAlias = int

Seconds: TypeAlias = float


@dataclass(frozen=True, slots=True)
class Stay:
    """An array's stay elsewhere.

    A planned array's lies between its last reader of its own phase and the first of a later one; that of one
    which the caller lends between any two accesses, and perhaps across two steps.

    Attributes:
        array: which.
        gone_before: the position in the order in front of which its memory becomes free; what runs again for
            that position comes afterwards.
        back_from: the position in front of which its memory is needed again; counted on beyond the order's
            end, if it is one of the next step.
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
        stays: of arrays that are elsewhere for a while, at most one of each planned one. That counts if its
            array is kept, and nothing that runs again reads it meanwhile. Stays are those of this order: what
            is proven of a problem with any holds for its order alone.
        lent: static arrays, the caller's, that may be elsewhere when nothing accesses them, between two
            steps, too: each step is the same. Their bytes count, the whole step long but for their stays;
            those of other static arrays never do.
        renewed: of these, the ones that the caller fills anew before each step, such as examples: nothing of
            them is elsewhere between two steps.

    Raises:
        ProblemError: if an array is lent or renewed that is not the caller's.
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
    lent: frozenset[ArrayIndex] = frozenset()
    renewed: frozenset[ArrayIndex] = frozenset()

    def __post_init__(self) -> None:
        """Check what is lent."""
        arrays = self.problem.arrays
        for array in sorted(self.lent | self.renewed):
            if not (0 <= array < len(arrays) and arrays[array].kind is ArrayKind.STATIC):
                raise ProblemError(f"only static arrays can be lent, or renewed: {array} is none")

    @property
    def lent_bytes(self) -> Bytes:
        """Bytes of all that is lent."""
        return sum(self.problem.arrays[array].size_bytes for array in self.lent)

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
        peak_bytes: most bytes of planned arrays, workspaces and what is lent alive at once in this sequence.
        extra_seconds: of the repetitions.
        dropped: the arrays that are made again, ascending.
    """

    executions: tuple[Execution, ...]
    peak_bytes: Bytes
    extra_seconds: Seconds
    dropped: tuple[ArrayIndex, ...]
