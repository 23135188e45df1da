"""``torch.compile(model, backend="olla_fx")``: every graph piece planned, in a buffer of its own."""

import copy
import gc
import warnings
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import olla_fx
from olla_fx import dynamo
from olla_solvers.errors import OptionError, SolverUnavailableError
from tests.olla_fx.comparisons import assert_same, assert_same_gradients
from tests.olla_fx.harness import CompiledLoop, assert_served
from tests.olla_fx.helpers import SmallNet, images, mlp, vectors


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    """Two graphs with Python between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SmallNet(), mlp(5, 5)

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden)


def test_the_entry_point_is_this_backend():
    (entry_point,) = metadata.entry_points(group="torch_dynamo_backends", name="olla_fx")
    assert entry_point.load() is dynamo.backend
    assert "olla_fx" in torch._dynamo.list_backends()


def test_by_name():
    model = mlp()
    x, y = vectors(1)[0]
    with torch.no_grad():
        expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        output = torch.compile(model, backend="olla_fx")(x)
    assert_same(expected, output.detach(), "answer")
    F.cross_entropy(output, y).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("model", "batches"), [(mlp, vectors), (SmallNet, images)])
def test_twenty_steps(model, batches):
    CompiledLoop(model()).run(batches(20)).assert_served(1)


def test_graph_breaks():
    """Both pieces hold activations at the same time: in one buffer they would spoil each other's."""
    CompiledLoop(Broken()).run(images(20)).assert_served(2)


def test_every_planned_graph_has_a_report():
    gc.collect()
    before = len(olla_fx.compiled_reports())
    compiled = CompiledLoop(Broken()).run(images(2))
    reports = olla_fx.compiled_reports()[before:]
    assert [report.stats for report in reports] == [module.stats for module in compiled.planned_modules()]
    for report in reports:
        assert report.plan.totals.gradient_bytes > 0
        assert report.plan.eager_totals.gradient_bytes > 0
        assert dict(report.plan.rows())["operators"] == f"{len(report.plan.order)}"
        assert "gradients" in str(report)


def test_reports_keep_no_graph_alive():
    gc.collect()
    before = len(olla_fx.compiled_reports())
    piece = dynamo.backend(torch.fx.symbolic_trace(mlp()), [])
    assert len(olla_fx.compiled_reports()) == before  # not called yet, so not planned
    piece(vectors(1)[0][0])
    assert len(olla_fx.compiled_reports()) == before + 1
    del piece
    gc.collect()
    assert len(olla_fx.compiled_reports()) == before


def test_sizes_that_dynamo_leaves_open():
    batches = [batch for size in (2, 3, 4, 2, 3) for batch in images(4, batch=size)]
    compiled = CompiledLoop(SmallNet(0.0)).run(batches)
    compiled.assert_served(2)  # Dynamo makes a second graph, for all further sizes


def test_evaluation_and_options():
    compiled = CompiledLoop(SmallNet(), options={"solver": "none"}).run(images(2))
    for called, _, _ in compiled.sides():
        called.eval()
    for image, _ in images(3):
        with torch.no_grad():
            assert_same(compiled.eager(image), compiled.step(image), "evaluation")
    compiled.assert_served(2)


def call_with_a_number(pair, batch):
    x, y = batch

    def loop(called, _):
        answer = called(x, 1.5 + pair.calls % 2)
        F.cross_entropy(answer, y).backward()
        return answer.detach()

    pair.run_loop(loop)


def test_numbers_that_dynamo_leaves_open():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(6, 8), nn.Dropout(0.25), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
            )

        def forward(self, x, scale):
            return self.body(x) * scale

    pair = CompiledLoop(Net(), dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for batch in (*vectors(10), *vectors(10, batch=5)):
            call_with_a_number(pair, batch)


def test_a_piece_that_cannot_be_captured_runs_as_it_is(capfd):
    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 6)

        def forward(self, x):
            return torch.linalg.inv(self.body.weight) @ self.body(x).T

    model = Inverse()
    x = torch.randn(6, 6)
    compiled = CompiledLoop(model)
    with pytest.warns(RuntimeWarning, match="runs without a plan: .*_linalg_check_errors"):
        output = compiled.step(x)
    assert_same(model(x).detach(), output.detach(), "answer")
    output.sum().backward()
    assert model.body.weight.grad is not None
    assert "Traceback" not in capfd.readouterr().err


class Unplanned(nn.Module):
    """An inverse, which no plan takes, and sizes and numbers in the graph."""

    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(6, 3), nn.Dropout(0.3)

    def forward(self, x, scale):
        weight = self.body.weight
        hidden = self.drop(self.body(x)) @ torch.linalg.inv(weight @ weight.t() + torch.eye(3))
        total = hidden.sum(0, keepdim=True).expand(len(x), 3) / len(x)
        return total * scale + torch.arange(len(x)).float().mean()


@pytest.mark.filterwarnings("ignore:a graph of .* operators runs without a plan")
def test_a_piece_without_a_plan_has_its_sizes_and_numbers_at_every_call():
    """A piece that was compiled for the first batch answered later ones with its size."""
    pair = CompiledLoop(Unplanned(), dynamic=True)
    for batch in (*vectors(3), *vectors(3, batch=7), *vectors(3, batch=3), *vectors(11)):
        call_with_a_number(pair, batch)
    assert not pair.planned_modules()


def test_a_compiled_function_that_calls_backward():
    """Planning within that backward is not compiled, too."""

    def step(module, x, y):
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    eager = mlp()
    model = copy.deepcopy(eager)
    compiled = torch.compile(step, backend=dynamo.backend)
    for batch in vectors(20):
        assert_same(step(eager, *batch), compiled(model, *batch), "loss")
    assert_same_gradients(eager, model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:a planned module is called within")
def test_a_checkpoint_around_a_compiled_model(use_reentrant):
    pair = CompiledLoop(SmallNet())
    for x, y in images(20):

        def loop(called, _, x=x, y=y):
            inputs = x.clone().requires_grad_()
            F.cross_entropy(checkpoint(called, inputs, use_reentrant=use_reentrant), y).backward()
            return inputs.grad

        pair.run_loop(loop)


def test_inference_mode():
    model = SmallNet().eval()
    compiled = CompiledLoop(model)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error", RuntimeWarning)
        for x, _ in images(3):
            assert_same(model(x), compiled.step(x), "answer")
    (module,) = compiled.planned_modules()
    assert (module.stats.binding, module.stats.replans, module.stats.cached_plans) == ("buffer", 0, 1)


def test_a_planned_module_in_a_compiled_model():
    """The model itself is compiled, in one graph."""
    eager = mlp()
    model = copy.deepcopy(eager)
    planned = olla_fx.optimize(model, vectors(1)[0][0], solver="none", fallback="raise")
    compiled = torch.compile(planned, backend=dynamo.backend, fullgraph=True)
    for x, y in vectors(3):
        for module in (eager, compiled):
            F.cross_entropy(module(x), y).backward()
    assert_same_gradients(eager, model)


def test_recomputation_and_rewrites_are_options():
    compiled = CompiledLoop(SmallNet(), options={"recompute": 0, "rewrites": "none"}).run(images(2))
    compiled.assert_served(1)
    plan = compiled.planned_modules()[0].plan
    assert not plan.recomputed.operators
    assert not plan.changes


def test_bad_options():
    graph_module = torch.fx.symbolic_trace(mlp())
    with pytest.raises(OptionError, match="no option 'speed'"):
        dynamo.backend(graph_module, [], options={"speed": 1})
    with pytest.raises(SolverUnavailableError, match="unknown solver"):
        dynamo.backend(graph_module, [], options={"solver": "scip"})
    with pytest.raises(OptionError, match="time_limit"):
        dynamo.backend(graph_module, [], options={"time_limit": -1})


def test_a_checkpoint_with_dropout_draws_its_masks_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.drop, self.head = nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)

        def inner(self, x):
            return self.head(self.drop(self.body(x).relu()))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    pair = CompiledLoop(Checkpointed()).run(vectors(5))
    pair.assert_served(1)
    assert pair.planned_modules()[0].plan.checkpointed_operators > 0


def test_models_of_one_graph_in_turn():
    """The gradients that one model's backward has left are in the way of the next, of the same plan."""
    models = [mlp() for _ in range(3)]
    eager = copy.deepcopy(models)
    compiled = [torch.compile(model, backend="olla_fx") for model in models]
    before = {id(module) for module in gc.get_objects() if type(module) is olla_fx.PlannedModule}
    for _ in range(5):
        x = vectors(1)[0][0]
        for theirs, ours, called in zip(eager, models, compiled, strict=True):
            for model, run in ((theirs, theirs), (ours, called)):
                model.zero_grad()
                run(x).square().mean().backward()
            pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
            assert_same(*zip(*((one.grad, other.grad) for one, other in pairs), strict=True), "gradients")
    (planned,) = (
        module
        for module in gc.get_objects()
        if type(module) is olla_fx.PlannedModule and id(module) not in before
    )
    assert_served(planned)
