"""Graphs too large to enumerate: wide random ones, and a residual network's step."""

from __future__ import annotations

import random

from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import Builder


def wide(count: int, window: int, seed: int = 0) -> Problem:
    """Every operator reads up to three of those shortly before it."""
    draw = random.Random(seed)
    readers: list[set[int]] = [set() for _ in range(count)]
    for reader in range(1, count):
        for _ in range(draw.randint(1, 3)):
            readers[draw.randrange(max(0, reader - window), reader)].add(reader)
    arrays = [Array(f"a{i}", 64 * draw.randint(1, 1000), i, tuple(sorted(readers[i]))) for i in range(count)]
    return Problem(tuple(Operator(f"op{i}") for i in range(count)), tuple(arrays))


def residual(blocks: int) -> Problem:
    """A chain of blocks with a shortcut around each, its gradients in reverse, and updates at the end."""
    step, updates = Builder(), []
    step.run("input", makes={"x0": 1000})
    for block in range(blocks):
        step.run(f"conv{block}", [f"x{block}"], {f"c{block}": 1000})
        step.run(f"relu{block}", [f"c{block}"], {f"r{block}": 1000})
        step.run(f"add{block}", [f"r{block}", f"x{block}"], {f"x{block + 1}": 1000})
    step.run("loss", [f"x{blocks}"], {f"g{blocks}": 1000})
    for block in reversed(range(blocks)):
        step.run(f"relu_grad{block}", [f"g{block + 1}", f"r{block}"], {f"d{block}": 1000})
        step.run(f"conv_grad{block}", [f"d{block}"], {f"e{block}": 1000})
        step.run(f"weight_grad{block}", [f"d{block}", f"x{block}"], {f"w{block}": 700 + block % 7})
        step.run(f"add_grad{block}", [f"e{block}", f"g{block + 1}"], {f"g{block}": 1000})
        updates.append(block)
    for block in updates:
        step.update(f"update{block}", [f"w{block}"], [f"conv{block}"])
    return step.build()
