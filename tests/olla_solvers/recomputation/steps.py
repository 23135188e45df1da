"""Small random steps with everything that recomputation has to mind, by a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.recomputation.problem import RecomputationProblem


@dataclass
class Kernel:
    """What an operator does: reads, makes, and writes over (which it reads, too)."""

    phase: int
    is_random: bool = False
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    makes: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A problem, and the kernels that its simulation needs."""

    problem: RecomputationProblem
    kernels: list[Kernel]


def random_step(seed: int, most_operators: int = 7) -> Step:
    """A step of a few operators: forward, then one or two later phases, in a random executable order."""
    return _Maker(random.Random(seed), most_operators).make()


def chain(layers: int, seconds: tuple[float, ...] = (1.0,)) -> RecomputationProblem:
    """Layers whose results backward reads in reverse, each of ten bytes."""
    operators = tuple(Operator(f"o{number}") for number in range(2 * layers))
    arrays = []
    for number in range(2 * layers - 1):
        readers = {number + 1}
        if number < layers:
            readers.add(2 * layers - 1 - number)
        arrays.append(Array(f"a{number}", 10, number, tuple(sorted(readers))))
    return RecomputationProblem(
        Problem(operators, tuple(arrays)),
        tuple(range(2 * layers)),
        tuple(itertools.islice(itertools.cycle(seconds), 2 * layers)),
        tuple((number,) if number < layers else () for number in range(2 * layers - 1)),
        tuple(number >= layers for number in range(2 * layers)),
    )


class _Maker:
    def __init__(self, draw: random.Random, most_operators: int) -> None:
        self.draw = draw
        self.forward = draw.randint(2, max(2, most_operators - 2))
        self.late = draw.randint(1, max(1, most_operators - self.forward))
        self.sizes = [draw.randint(1, 9) for _ in range(2)]
        self.kinds = [ArrayKind.STATIC, ArrayKind.STATIC]
        self.producers: list[int | None] = [None, None]
        self.kernels: list[Kernel] = []
        self.before: set[tuple[int, int]] = set()
        self.taken: list[tuple[int, int]] = []

    def make(self) -> Step:
        for _ in range(self.forward):
            self._add_forward()
        last = self.draw.randint(1, self.late + 1)
        for number in range(self.late):
            self._add_late(1 + (number >= last))
        problem = self._problem()
        makers, must_precede = self._makers(), {}
        for static in (0, 1):
            writers = [each for each, kernel in enumerate(self.kernels) if static in kernel.writes]
            for operator in {each for group in makers for each in group}:
                later = [writer for writer in writers if writer > operator]
                if later and static in self.kernels[operator].reads:
                    must_precede[operator] = tuple(sorted({*must_precede.get(operator, ()), *later}))
        return Step(
            RecomputationProblem(
                problem,
                self._order(problem),
                tuple(float(self.draw.randint(1, 5)) for _ in self.kernels),
                makers,
                tuple(kernel.phase for kernel in self.kernels),
                must_precede,
                tuple(self.taken),
            ),
            self.kernels,
        )

    def _new(self, operator: int, kind: ArrayKind = ArrayKind.PLANNED) -> int:
        self.sizes.append(self.draw.randint(0, 9))
        self.kinds.append(kind)
        self.producers.append(operator)
        return len(self.sizes) - 1

    def _add_forward(self) -> None:
        number = len(self.kernels)
        kernel = Kernel(0, self.draw.random() < 0.1)
        made = [index for index, producer in enumerate(self.producers) if producer is not None]
        kernel.reads.update(self.draw.sample(made, min(len(made), self.draw.choice((1, 1, 2)))))
        if self.draw.random() < 0.3:
            kernel.reads.add(self.draw.randint(0, 1))
        planned = [each for each in kernel.reads if self.kinds[each] is ArrayKind.PLANNED]
        if planned and self.draw.random() < 0.25:
            kernel.writes.add(self.draw.choice(planned))
        for _ in range(self.draw.choice((0, 1, 1)) if kernel.writes else self.draw.choice((1, 1, 1, 2))):
            kind = ArrayKind.OUTPUT if self.draw.random() < 0.1 else ArrayKind.PLANNED
            kernel.makes.append(self._new(number, kind))
        self._finish(kernel)

    def _add_late(self, phase: int) -> None:
        number = len(self.kernels)
        kernel = Kernel(phase)
        made = [index for index, producer in enumerate(self.producers) if producer is not None]
        late = [index for index in made if self.kernels[self.producers[index] or 0].phase]
        kernel.reads.update(self.draw.sample(made, min(len(made), self.draw.randint(1, 3))))
        kernel.reads.update(late[-1:])
        for _ in range(self.draw.choice((0, 1, 1, 2))):
            kernel.makes.append(self._new(number))
        if not kernel.makes or self.draw.random() < 0.2:
            own = [index for index in late if self.kernels[self.producers[index] or 0].phase == phase]
            kernel.writes.add(own[-1] if own and self.draw.random() < 0.3 else self.draw.randint(0, 1))
            kernel.reads |= kernel.writes
        self._finish(kernel)

    def _finish(self, kernel: Kernel) -> None:
        number = len(self.kernels)
        for earlier, other in enumerate(self.kernels):
            if (kernel.writes & other.reads) or (kernel.reads & other.writes):
                self.before.add((earlier, number))
        self.kernels.append(kernel)
        for read in kernel.reads - kernel.writes:
            for made in kernel.makes:
                kinds = {self.kinds[read], self.kinds[made]}
                if kinds == {ArrayKind.PLANNED} and self.draw.random() < 0.3:
                    self.sizes[made] = self.sizes[read]
                    self.taken.append((read, made))

    def _problem(self) -> Problem:
        operators = tuple(
            Operator(f"o{number}", self.draw.choice((0, 0, 0, 3))) for number in range(len(self.kernels))
        )
        arrays = tuple(
            Array(
                f"a{index}",
                size,
                self.producers[index],
                tuple(number for number, kernel in enumerate(self.kernels) if index in kernel.reads),
                self.kinds[index],
            )
            for index, size in enumerate(self.sizes)
        )
        self.taken = [(read, made) for read, made in self.taken if self.sizes[read] == self.sizes[made]]
        return Problem(operators, arrays, tuple(sorted(self.before)))

    def _order(self, problem: Problem) -> tuple[int, ...]:
        order: list[int] = []
        while len(order) < len(self.kernels):
            ready = [
                operator
                for operator in range(len(self.kernels))
                if operator not in order and all(each in order for each in problem.predecessors[operator])
            ]
            order.append(ready[0] if self.draw.random() < 0.6 else self.draw.choice(ready))
        return tuple(order)

    def _makers(self) -> tuple[tuple[int, ...], ...]:
        """By the rule: nothing random, nothing that reads what its phase overwrites later, but in place."""
        result = []
        for index, producer in enumerate(self.producers):
            phase = 0 if producer is None else self.kernels[producer].phase
            makers = [
                number
                for number, kernel in enumerate(self.kernels)
                if number == producer or (index in kernel.writes and kernel.phase == phase)
            ]
            fine = producer is not None and self.kinds[index] is ArrayKind.PLANNED
            for number in makers:
                kernel = self.kernels[number]
                fine = fine and not kernel.is_random
                for read in kernel.reads:
                    later = [
                        other
                        for other in range(number + 1, len(self.kernels))
                        if read in self.kernels[other].writes and self.kernels[other].phase == phase
                    ]
                    fine = fine and (read == index or not later)
                # An operator that writes over two arrays is not run for one of them alone.
                fine = fine and kernel.writes <= {index}
            result.append(tuple(makers) if fine else ())
        return tuple(result)


def u_shaped(levels: int) -> tuple[RecomputationProblem, RecomputationProblem]:
    """A network down and up whose large results are read at both ends, with updates at the end, and early."""
    count = 2 * levels
    arrays = []
    for number in range(count):
        opposite = count - 1 - number
        readers = {number + 1, count + opposite} | (
            {opposite, count + number} if number < levels - 1 else set()
        )
        arrays.append(Array(f"x{number}", _u_shaped_bytes(number, count), number, tuple(sorted(readers))))
    for number in range(count):
        backward = count + number
        if number + 1 < count:
            size_bytes = _u_shaped_bytes(count - 1 - number, count)
            arrays.append(Array(f"g{number}", size_bytes, backward, (backward + 1,)))
        arrays.append(Array(f"w{number}", 15, backward, (backward + count,)))
    names = [f"{kind}{number}" for kind in "fbu" for number in range(count)]
    forward, backward = (
        [first + number * 7 % 5 for number in range(start, start + count)]
        for first, start in ((1.0, 0), (2.0, count))
    )
    late = RecomputationProblem(
        Problem(tuple(map(Operator, names)), tuple(arrays)),
        tuple(range(3 * count)),
        (*forward, *backward, *([0.1] * count)),
        tuple((array.producer,) if array.name.startswith("x") else () for array in arrays),
        tuple(int(operator >= count) for operator in range(3 * count)),
    )
    updates = itertools.chain.from_iterable(
        zip(range(count, 2 * count), range(2 * count, 3 * count), strict=True)
    )
    return late, replace(late, order=(*range(count), *updates))


def _u_shaped_bytes(number: int, count: int) -> int:
    level = min(number, count - 1 - number)
    return 10 * max(1, 64 >> level // 2)
