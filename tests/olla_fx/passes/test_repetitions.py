"""What of a step may run again, what the planner is told of it, and what is refused."""

import pytest
import torch
from torch import nn

from olla_fx import draws
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.dataflow import build_dataflow
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import REPEATED
from olla_fx.passes import run_passes
from olla_fx.passes.repeatable import Repeatable
from olla_fx.passes.repetitions import OperatorRun, repeat_operators
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputation.problem import recomputation_problem, with_repetitions
from olla_fx.rewrites import REWRITES
from olla_solvers.analysis import peak_bytes
from olla_solvers.recomputation.problem import Execution
from tests.olla_fx.helpers import ADAMW, SmallNet, Written, captured_training, images, sgd, vectors
from tests.olla_fx.recomputation.dropping import drop, planning_dataflow, problem_of

CPU = torch.device("cpu")


def problem_and_names(model, batch, make_optimizer=sgd):
    dataflow = planning_dataflow(captured_training(model, batch, make_optimizer))
    problem = recomputation_problem(
        dataflow, dataflow.problem.captured_order, [1.0] * len(dataflow.operators)
    )
    return problem, [str(node.target).removeprefix("aten.") for node in dataflow.operators]


def makers_by_target(model, batch):
    """Return for each array of forward the operators that make it again, by their targets' names."""
    problem, targets = problem_and_names(model, batch)
    arrays = zip(problem.problem.arrays, problem.makers, strict=True)
    return [
        (targets[array.producer], [targets[maker] for maker in makers])
        for array, makers in arrays
        if array.producer is not None and not problem.phases[array.producer]
    ]


def test_operators_in_place_belong_to_what_they_write_to():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 5)
    )
    norm = "_native_batch_norm_legit.default"
    made = makers_by_target(model, images(1)[0])
    assert made[0] == ("convolution.default", ["convolution.default"])
    assert made[1] == (norm, [norm, "relu_.default"])
    assert made[2:4] == [(norm, [norm])] * 2


@pytest.mark.parametrize("width", [8, 40_000])
def test_of_a_dropout_the_result_is_made_again_and_the_mask_if_it_is_larger_than_a_state(width):
    model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.Linear(width, 3))
    made = dict(makers_by_target(model, vectors(1)[0]))
    mask, product = "olla_fx.dropout_mask.default", "olla_fx.dropout_backward.default"
    assert made[product] == [product]
    assert made[mask] == ([mask] if width > 8 else [])


def test_nothing_is_drawn_again_in_a_cuda_graph():
    model = nn.Sequential(nn.Linear(6, 40_000), nn.Dropout(0.5), nn.Linear(40_000, 3))
    graph = planning_dataflow(captured_training(model, vectors(1)[0])).graph_module.graph
    (mask,) = graph.find_nodes(op="call_function", target=draws.dropout_mask)
    for sets_states in (True, False):
        probe = Probe(CPU, False, lambda _, ask: ask(), sets_states)
        assert Repeatable(graph, CPU, probe).may_run_again(mask) == sets_states


def reads_before_a_write(self, x):
    x = self.first(x)
    return self.last((x + x.sum()).exp())


def updated_after_it_was_read(self, x):
    shifted = self.first(x).exp() + self.scale
    self.scale.add_(1.0)
    return self.last(shifted.sigmoid())


def test_what_reads_what_forward_overwrites_runs_once():
    parts = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 3)}
    made = makers_by_target(Written(reads_before_a_write, **parts), vectors(1)[0])
    assert ("addmm.default", ["addmm.default", "add_.Tensor", "exp_.default"]) in made
    assert ("sum.default", []) in made
    model = Written(updated_after_it_was_read, **parts, scale=torch.ones(8))
    made = makers_by_target(model, vectors(1)[0])
    assert ("addmm.default", ["addmm.default", "exp_.default"]) in made
    assert ("add.Tensor", []) in made


def sums_by_index(self, x):
    hidden = self.first(x).relu()
    rows = torch.arange(x.shape[0], device=x.device)
    return self.last(torch.zeros_like(hidden).index_add(0, rows, hidden).tanh())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_adds_up_in_any_sequence_runs_again_on_the_cpu_alone(device, monkeypatch):
    monkeypatch.setattr(Repeatable, "_is_planned", lambda *_: True)
    model = Written(sums_by_index, first=nn.Linear(6, 8), last=nn.Linear(8, 3))
    graph = planning_dataflow(captured_training(model, vectors(1)[0])).graph_module.graph
    repeatable = Repeatable(graph, torch.device(device), None)
    again = {node.name for node in graph.nodes if repeatable.may_run_again(node)}
    assert {"relu", "tanh"} <= again
    assert ("index_add" in again) == (device == "cpu")


@pytest.mark.parametrize("agrees", [True, False])
def test_batch_norms_run_again_if_their_bits_are_equal_without_statistics(agrees):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, y = images(1, size=16)[0]
    dataflow = planning_dataflow(captured_training(model.double(), (x.double(), y)))
    asked = []

    def remember(question, ask):
        asked.append(question)
        return ask() and agrees

    probe = Probe(CPU, True, remember)
    (norm,) = (node for node in dataflow.operators if "batch_norm_legit" in str(node.target))
    assert Repeatable(dataflow.graph_module.graph, CPU, probe).may_run_again(norm) == agrees
    assert [next(iter(question)) for question in asked] == ["batch norm without statistics"]
    order = range(len(dataflow.operators))
    problem = recomputation_problem(dataflow, order, [1.0] * len(order), probe)
    number = dataflow.operators.index(norm)
    dropped = {array for array, makers in enumerate(problem.makers) if number in makers}
    assert bool(dropped) == agrees
    with_repetitions(dataflow, drop(problem, dropped), probe)


def test_nothing_runs_again_without_a_backward():
    captured = capture(StepRequest(SmallNet(), images(1)[0][:1], Mode.INFERENCE))
    problem = problem_of(planning_dataflow(captured))
    assert not any(problem.makers)


def test_repetitions_precede_the_update_of_what_they_read():
    problem, _ = problem_and_names(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), vectors(1)[0])
    by_name = {operator.name: number for number, operator in enumerate(problem.problem.operators)}
    written = problem.must_precede[by_name["addmm"]]
    assert len(written) == 2
    assert all(problem.phases[operator] for operator in written)


def test_decay_of_weights_does_not_come_before_it_must():
    """It needs no memory, and would overwrite what repetitions read."""
    dataflow = planning_dataflow(captured_training(nn.Linear(6, 3), vectors(1)[0], ADAMW))
    names = [str(node.target) for node in dataflow.operators]
    early = sorted(dataflow.problem.captured_order, key=lambda number: names[number] != "aten.mul_.Tensor")
    order, placed = [], set()
    while len(order) < len(early):
        ready = (number for number in early if number not in placed)
        order.append(next(n for n in ready if placed.issuperset(dataflow.problem.predecessors[n])))
        placed.add(order[-1])
    problem = recomputation_problem(dataflow, order, [1.0] * len(order))
    assert problem.problem.is_executable(problem.order)
    assert peak_bytes(dataflow.problem, problem.order) == peak_bytes(dataflow.problem, order)
    decays = [step for step, number in enumerate(problem.order) if names[number] == "aten.mul_.Tensor"]
    gradient = next(step for step, number in enumerate(problem.order) if names[number] == "aten.mm.default")
    assert min(decays) > gradient > min(order.index(number) for number in early[:1])


@pytest.mark.parametrize("rewrites", [(), REWRITES])
def test_planning_keeps_what_forward_made_and_the_names_of_operators(rewrites):
    captured = captured_training(SmallNet(), images(1)[0])
    one, other = (planning_dataflow(captured, rewrites) for _ in range(2))
    assert [node.name for node in one.operators] == [node.name for node in other.operators]
    problem = problem_of(one)
    for array in problem.problem.arrays:
        if array.producer is not None and not problem.phases[array.producer]:
            written = [one.operators[reader] for reader in array.consumers if problem.phases[reader]]
            assert not any(str(node.target).split(".")[1].endswith("_") for node in written)


def test_without_repetitions_results_are_over_arguments_again():
    captured = captured_training(SmallNet(), images(1)[0])
    dataflow = planning_dataflow(captured)
    plain = build_dataflow(run_passes(captured).graph_module, captured.device)
    problem = recomputation_problem(
        dataflow, dataflow.problem.captured_order, [1.0] * len(dataflow.operators)
    )
    restored = with_repetitions(dataflow, drop(problem, ())).dataflow
    assert len(restored.problem.planned) == len(plain.problem.planned)
    taken = {dataflow.problem.arrays[made].name for _, made in problem.takes_over}
    planned = {array.name for array in dataflow.problem.planned}
    assert planned - {array.name for array in restored.problem.planned} <= taken


def test_repetitions_stand_in_front_of_their_first_reader():
    dataflow = planning_dataflow(captured_training(SmallNet(), images(1)[0]))
    problem = problem_of(dataflow)
    dropped = [array for array, makers in enumerate(problem.makers) if makers]
    repeated = with_repetitions(dataflow, drop(problem, dropped, again=0.5))
    nodes = list(repeated.dataflow.graph_module.graph.nodes)
    for node in nodes:
        if node.meta.get(REPEATED) and node.users:
            assert min(nodes.index(user) for user in node.users) > nodes.index(node)
    names = {operator.name for operator in repeated.dataflow.problem.operators}
    assert set(repeated.order) == names


def test_a_repetition_that_nobody_reads_is_left_out():
    dataflow = planning_dataflow(captured_training(SmallNet(), images(1)[0]))
    problem = problem_of(dataflow)
    convolution = next(n for n, node in enumerate(dataflow.operators) if "convolution" in node.name)
    executions = [*map(Execution, problem.order), Execution(convolution, 1)]
    repeated = with_repetitions(dataflow, executions)
    assert len(repeated.dataflow.operators) == len(dataflow.operators)


@pytest.mark.parametrize("name", ["native_dropout", "convolution_backward"])
def test_what_may_run_but_once_is_not_repeated(name):
    dataflow = planning_dataflow(
        captured_training(SmallNet().bfloat16(), (images(1)[0][0].bfloat16(), images(1)[0][1]))
    )
    names = [operator.name for operator in dataflow.problem.operators]
    runs = []
    for operator in names:
        if operator == names[-1]:
            target = name if name in names else "bernoulli"
            runs.append(OperatorRun(target, 1))
            runs.append(OperatorRun(operator, 0, {target: 1}))
        else:
            runs.append(OperatorRun(operator))
    with pytest.raises(CaptureError, match="cannot run again"):
        repeat_operators(dataflow.graph_module, runs, CPU)
