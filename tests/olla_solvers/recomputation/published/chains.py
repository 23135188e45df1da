"""Chains of layers as in the paper's analysis: all alike, each gradient reads its layer's input."""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.recomputation.problem import RecomputationProblem


def chain(
    layers: int, sizes: Sequence[int] | None = None, seconds: Sequence[float] | None = None
) -> RecomputationProblem:
    """Layer i reads result i - 1; its gradient reads result i and gradient i + 1."""
    sizes = sizes or [1] * layers
    operators = [Operator(f"layer{i}") for i in range(layers)] + [
        Operator(f"gradient{i}") for i in range(layers)
    ]
    arrays = []
    for i in range(layers):
        readers = {layers + i}
        if i + 1 < layers:
            readers.add(i + 1)
        arrays.append(Array(f"result{i}", sizes[i], i, tuple(sorted(readers))))
    for i in range(layers):
        arrays.append(Array(f"g{i}", sizes[i], layers + i, (layers + i - 1,) if i else ()))
    order = (*range(layers), *reversed(range(layers, 2 * layers)))
    return RecomputationProblem(
        Problem(tuple(operators), tuple(arrays)),
        order,
        tuple(seconds or [1.0] * layers) + (2.0,) * layers,
        tuple((i,) for i in range(layers)) + ((),) * layers,
        tuple(i >= layers for i in range(2 * layers)),
    )


def residual_chain(blocks: int) -> RecomputationProblem:
    """A step of blocks ``x + f(x)``; gradients of f read x, the last one reads the result."""
    operators, arrays, makers = [Operator("stem")], [Array("x0", 1, 0)], [(0,)]
    readers: list[set[int]] = [set()]
    for block in range(blocks):
        for name, reads in ((f"f{block}", {2 * block}), (f"x{block + 1}", {2 * block, 2 * block + 1})):
            number = len(operators)
            operators.append(Operator(name))
            arrays.append(Array(name, 1, number))
            readers.append(set())
            makers.append((number,))
            for read in reads:
                readers[read].add(number)
    forward = len(operators)
    previous = None
    for block in reversed(range(blocks)):
        number = len(operators)
        operators.append(Operator(f"gradient{block}"))
        arrays.append(Array(f"g{block}", 1, number))
        readers.append(set())
        makers.append(())
        readers[2 * block].add(number)
        readers[2 * block + 1].add(number)
        if previous is None:
            readers[2 * blocks].add(number)
        else:
            readers[previous].add(number)
        previous = len(arrays) - 1
    final = tuple(
        Array(array.name, array.size_bytes, array.producer, tuple(sorted(read)))
        for array, read in zip(arrays, readers, strict=True)
    )
    return RecomputationProblem(
        Problem(tuple(operators), final),
        tuple(range(len(operators))),
        (1.0,) * len(operators),
        tuple(makers),
        tuple(operator >= forward for operator in range(len(operators))),
    )
