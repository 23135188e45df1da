"""Problems for tests: two written by hand, random small ones, and the exhaustive answer for these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import networkx
from hypothesis import strategies as st

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.order.bounds import MinimumCuts
from olla_solvers.plan import Span
from olla_solvers.problem import Array, ArrayKind, Operator, Problem


class Builder:
    """Collects operators, arrays and edges by name."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.operators: list[Operator] = []
        self.sizes: dict[str, tuple[int, int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.kinds: dict[str, ArrayKind] = {}
        self.before: list[tuple[int, int]] = []

    def run(self, name: str, reads: Sequence[str] = (), makes: dict[str, int] | None = None) -> None:
        number = len(self.operators)
        self.index[name] = number
        self.operators.append(Operator(name))
        for array in reads:
            self.readers[array].append(number)
        for array, size in (makes or {}).items():
            self.sizes[array] = (number, size)
            self.readers[array] = []

    def update(self, name: str, reads: Sequence[str], after: Sequence[str]) -> None:
        """An in-place update: makes no array, runs after everything that reads what it overwrites."""
        self.run(name, reads)
        self.before.extend((self.index[earlier], self.index[name]) for earlier in after)

    def build(self) -> Problem:
        arrays = [
            Array(
                name,
                size,
                producer,
                tuple(sorted(set(self.readers[name]))),
                self.kinds.get(name, ArrayKind.PLANNED),
            )
            for name, (producer, size) in self.sizes.items()
        ]
        return Problem(tuple(self.operators), tuple(arrays), tuple(self.before))


def mlp_step() -> Problem:
    """Forward, backward and SGD update of a two-layer MLP, captured with all updates at the end."""
    step = Builder()
    step.run("linear1", makes={"h": 400})
    step.run("relu", ["h"], {"a": 400})
    step.run("linear2", ["a"], {"y": 100})
    step.run("loss", ["y"], {"value": 4})
    step.kinds["value"] = ArrayKind.OUTPUT
    step.run("loss_backward", ["y"], {"dy": 100})
    step.run("weight2_grad", ["dy", "a"], {"dw2": 4000})
    step.run("bias2_grad", ["dy"], {"db2": 40})
    step.run("relu_grad", ["dy", "a"], {"dh": 400})
    step.run("weight1_grad", ["dh"], {"dw1": 8000})
    step.run("bias1_grad", ["dh"], {"db1": 40})
    step.update("update_w1", ["dw1"], ["linear1"])
    step.update("update_b1", ["db1"], ["linear1"])
    step.update("update_w2", ["dw2"], ["linear2", "relu_grad"])
    step.update("update_b2", ["db2"], ["linear2"])
    return step.build()


CONVOLUTIONS = ((64, 774), (192, 559), (384, 259), (256, 173), (256, 173))
"""Of an AlexNet-like net: kibibytes of each convolution's weight gradient and of its output."""


def alexnet_step() -> Problem:
    """69 operators: five convolutions, three linear layers, dropout, pools; updates at the end."""
    step = Builder()
    layers: list[tuple[str, int, int]] = []
    current, saved = "", {}
    for number, (weight, output) in enumerate(CONVOLUTIONS):
        layers.append((f"conv{number}", weight * 1024, output * 1024))
    layers += [("fc0", 151 << 20, 16 << 10), ("fc1", 64 << 20, 16 << 10), ("fc2", 16 << 20, 4 << 10)]
    for name, _, output in layers:
        if name in ("fc0", "fc1"):
            step.run(f"{name}_dropout", [current], {f"{name}_dropped": output, f"{name}_mask": output // 4})
            current = f"{name}_dropped"
        saved[name] = current
        step.run(name, [current] if current else [], {f"{name}_out": output})
        step.run(f"{name}_relu", [f"{name}_out"], {f"{name}_act": output})
        current = f"{name}_act"
        if name in ("conv0", "conv1", "conv4"):
            step.run(
                f"{name}_pool", [current], {f"{name}_pooled": output // 4, f"{name}_indices": output // 2}
            )
            current = f"{name}_pooled"
    step.run("log_softmax", [current], {"log": 4096})
    step.run("loss", ["log"], {"value": 64})
    step.run("loss_out", ["value"], {"returned": 64})
    step.kinds["returned"] = ArrayKind.OUTPUT
    step.run("loss_backward", ["value"], {"dlog": 4096})
    step.run("log_softmax_backward", ["dlog", "log"], {"grad": 4096})
    _backward(step, layers, saved)
    return step.build()


def _backward(step: Builder, layers: list[tuple[str, int, int]], saved: dict[str, str]) -> None:
    gradient, updates = "grad", []
    for name, weight, output in reversed(layers):
        if name in ("conv0", "conv1", "conv4"):
            step.run(f"{name}_pool_backward", [gradient, f"{name}_indices"], {f"d_{name}_pool": output})
            gradient = f"d_{name}_pool"
        step.run(f"{name}_relu_backward", [gradient, f"{name}_act"], {f"d_{name}": output})
        below = [saved[name]] if saved[name] else []
        if name.startswith("fc"):
            step.run(f"{name}_weight", [f"d_{name}", *below], {f"{name}_dw": weight})
            step.run(f"{name}_bias", [f"d_{name}"], {f"{name}_db": output // 4})
            step.run(f"{name}_input", [f"d_{name}"], {f"{name}_dx": output})
        else:
            made = {f"{name}_dx": output, f"{name}_dw": weight, f"{name}_db": 1024}
            step.run(f"{name}_backward", [f"d_{name}", *below], made)
        gradient = f"{name}_dx"
        if name in ("fc0", "fc1"):
            step.run(f"{name}_dropout_backward", [gradient, f"{name}_mask"], {f"{name}_ddrop": output})
            gradient = f"{name}_ddrop"
        readers = [name, f"{name}_input" if name.startswith("fc") else f"{name}_backward"]
        updates.append((name, readers))
    for name, readers in updates:
        step.update(f"{name}_update_w", [f"{name}_dw"], readers)
        step.update(f"{name}_update_b", [f"{name}_db"], readers[:1])


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> Problem:
    """Small random problems with everything that a problem may have."""
    count = draw(st.integers(1, most))
    operators = tuple(Operator(f"op{i}", draw(st.sampled_from([0, 0, 0, 5, 16]))) for i in range(count))
    arrays: list[Array] = []
    for producer in range(count):
        for number in range(draw(st.integers(0, 2))):
            later = range(producer + 1, count)
            readers = tuple(sorted(draw(st.sets(st.sampled_from(later), max_size=3)))) if later else ()
            kind = draw(st.sampled_from([ArrayKind.PLANNED] * 5 + [ArrayKind.OUTPUT, ArrayKind.STATIC]))
            size = draw(st.sampled_from([0, 1, 3, 8, 12, 20, 64]))
            arrays.append(Array(f"array{producer}_{number}", size, producer, readers, kind))
    arrays.append(Array("weights", 1000, None, tuple(range(count)), ArrayKind.STATIC))
    before = tuple(
        (earlier, later)
        for earlier, later in draw(
            st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=3)
        )
        if earlier < later
    )
    return Problem(operators, tuple(arrays), before)


@st.composite
def training_steps(draw: st.DrawFn, most: int = 4) -> Problem:
    """Small problems in the shape of a training step: layers, their gradients in reverse, updates."""
    layers = draw(st.integers(2, most))
    sizes = st.integers(1, 30)
    outputs = [draw(sizes) for _ in range(layers)]
    operators = [Operator(f"forward{i}") for i in range(layers)]
    operators += [Operator(f"backward{i}", draw(st.sampled_from([0, 0, 7]))) for i in range(layers)[::-1]]
    arrays: list[Array] = []
    for layer, output in enumerate(outputs):
        back = 2 * layers - 1 - layer
        readers = {layer + 1 if layer + 1 < layers else back}
        if draw(st.booleans()):
            readers.add(back)
        if layer + 2 < layers and draw(st.booleans()):
            readers.add(layer + 2)
        arrays.append(Array(f"output{layer}", output, layer, tuple(sorted(readers))))
        if layer:
            arrays.append(Array(f"gradient{layer}", outputs[layer - 1], back, (back + 1,)))
        if draw(st.booleans()):
            arrays.append(Array(f"update{layer}", draw(sizes), back, (len(operators),)))
            operators.append(Operator(f"update{layer}"))
    return Problem(tuple(operators), tuple(arrays))


def smallest_peak(problem: Problem) -> int:
    """The smallest peak over all orders, by trying every operator last for every set of operators."""
    count = len(problem.operators)
    needs = [sum(1 << earlier for earlier in problem.predecessors[v]) for v in range(count)]

    def cost(done: int, running: int) -> int:
        now = done | 1 << running
        alive = 0
        for array in problem.planned:
            born = array.producer is not None and now >> array.producer & 1
            made_now = array.producer == running
            waiting = any(not done >> consumer & 1 for consumer in array.consumers)
            if born and (made_now or waiting):
                alive += array.size_bytes
        return alive + problem.operators[running].workspace_bytes

    @cache
    def best(done: int) -> int:
        if done == (1 << count) - 1:
            return 0
        choices = [v for v in range(count) if not done >> v & 1 and needs[v] & ~done == 0]
        return min(max(cost(done, v), best(done | 1 << v)) for v in choices)

    return best(0)


def precedence_bound(problem: Problem) -> int:
    """Return what is alive while some operator runs in every order, by sets of ancestors and descendants."""
    graph = networkx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(problem.operators)))
    bound = 0
    for operator, made in enumerate(problem.operators):
        above = networkx.ancestors(graph, operator) | {operator}
        below = networkx.descendants(graph, operator) | {operator}
        alive = made.workspace_bytes
        for array in problem.planned:
            if array.producer == operator or (array.producer in above and below & set(array.consumers)):
                alive += array.size_bytes
        bound = max(bound, alive)
    return bound


def mincut_bytes(flow: FlowGraph, deadline: float = float("inf")) -> int:
    """The bound by minimum cuts at all operators."""
    cuts = MinimumCuts(flow, range(flow.count), 0)
    cuts.run(deadline)
    return cuts.bound_bytes


@st.composite
def spans(draw: st.DrawFn, most: int, *, given: bool = False) -> tuple[Span, ...]:
    """Small random span lists; with ``given``, one of them may have its offset."""
    made = []
    for number in range(draw(st.integers(0, most))):
        lower = draw(st.integers(0, 6))
        made.append(
            Span(
                f"s{number}",
                lower,
                lower + draw(st.integers(1, 5)),
                draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13])),
                draw(st.sampled_from([1, 1, 1, 2, 4])),
            )
        )
    if given and made:
        first = made[0]
        made[0] = Span(first.name, first.lower, first.upper, first.size_bytes, first.alignment, 4)
    return tuple(made)
