"""Plans under fake tensors: figures, files and plots."""

import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import Plan
from olla_solvers.errors import ProblemError, ValidationError
from olla_solvers.problem import ArrayKind
from olla_solvers.validate import validate
from tests.olla_fx.helpers import SmallNet, Written, images, mlp, sgd, vectors


def plan_of(model, example, make=sgd, **options):
    options = {"solver": "none", "loss_fn": F.cross_entropy, **options}
    return olla_fx.plan(model, example, optimizer=make(model.parameters()), **options)


@pytest.fixture(scope="module")
def plan():
    torch.manual_seed(0)
    return plan_of(SmallNet(), images(1)[0], optim.AdamW)


def test_figures_agree(plan):
    assert plan.buffer_bytes >= plan.peak_bytes >= plan.lower_bound_bytes > 0
    assert plan.is_optimal is (plan.peak_bytes == plan.lower_bound_bytes)
    assert plan.fragmentation == (plan.buffer_bytes - plan.peak_bytes) / plan.buffer_bytes
    assert plan.total_bytes == plan.static_bytes + plan.output_bytes + plan.buffer_bytes
    assert plan.gradient_bytes == 0
    assert plan.workspace_bytes == 0
    assert plan.output_bytes == 64
    assert sorted(plan.order) == sorted(operator.name for operator in plan.problem.operators)
    planned = {array.name for array in plan.problem.arrays if array.kind is ArrayKind.PLANNED}
    assert set(plan.offsets) == planned
    assert all(offset % 64 == 0 for offset in plan.offsets.values())
    assert {"capture", "passes", "order", "place"} <= set(plan.timings)
    assert all(seconds >= 0 for seconds in plan.timings.values())
    assert plan.provenance.order_found_by
    validate(plan.problem, plan.memory)


def test_the_baseline_is_followed_under_fake_tensors(plan):
    assert plan.baseline is not None
    assert plan.baseline.live_peak_bytes > 0
    assert plan.baseline.reserved_bytes >= plan.baseline.live_peak_bytes
    assert plan_of(mlp(), vectors(1)[0], baseline=False).baseline is None


def test_static_arrays_are_parameters_buffers_state_and_inputs():
    model = mlp()
    plan = plan_of(model, vectors(1)[0])
    tensors = [*model.parameters(), *vectors(1)[0]]
    assert plan.static_bytes == sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)


@pytest.mark.parametrize("make", [sgd, optim.AdamW])
def test_meta_models_give_the_plan_of_real_ones(make):
    real = plan_of(SmallNet(), images(1)[0], make)
    with torch.device("meta"):
        x, y = torch.empty(2, 3, 8, 8), torch.empty(2, dtype=torch.long)
        meta = plan_of(SmallNet(), (x, y), make)
    assert meta.problem == real.problem
    assert (meta.order, meta.offsets) == (real.order, real.offsets)
    assert meta.baseline is not None
    assert meta.baseline.live_peak_bytes == real.baseline.live_peak_bytes


def test_a_step_that_would_not_fit_any_machine_is_planned():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 18, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 10))
        example = torch.empty(1 << 16, 1 << 18), torch.empty(1 << 16, dtype=torch.long)
        plan = plan_of(model, example, optim.AdamW)
    assert plan.total_bytes > 2**39


def test_existing_state_is_not_read():
    model = mlp()
    optimizer = optim.AdamW(model.parameters())
    fresh = olla_fx.plan(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    F.cross_entropy(model(vectors(1)[0][0]), vectors(1)[0][1]).backward()
    optimizer.step()
    used = olla_fx.plan(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert fresh.problem == used.problem


def test_inference_plans_have_no_state():
    plan = olla_fx.plan(mlp().eval(), torch.ones(4, 6), solver="none")
    assert not [name for name in plan.order if "backward" in name]
    assert plan.output_bytes == 64


@pytest.mark.parametrize("solver", ["auto", "none", "cbc", "highs"])
def test_solvers(solver):
    pytest.importorskip({"cbc": "pulp", "highs": "highspy"}.get(solver, "pulp"))
    plan = plan_of(mlp(), vectors(1)[0], solver=solver, baseline=False)
    assert plan.is_optimal
    assert plan.peak_bytes == plan_of(mlp(), vectors(1)[0], baseline=False).peak_bytes


# Files


def test_saving_and_loading(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.problem == plan.problem
    assert again.memory == plan.memory
    assert again.baseline == plan.baseline
    assert again.timings == plan.timings
    assert again.to_json() == plan.to_json()
    json.dumps(plan.to_json(), allow_nan=False)


def test_a_recorded_plan_is_saved_with_its_workspaces(tmp_path):
    model = SmallNet()
    step = olla_fx.optimize(
        model,
        images(1)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        solver="none",
        fallback="raise",
    )
    before = step.plan
    step(*images(1)[0])
    after = step.plan
    assert before.workspace_bytes == 0
    assert after.workspace_bytes > 0
    assert after.buffer_bytes >= before.peak_bytes
    after.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").memory == after.memory
    reported = step.report().plan
    reported.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == reported


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"format": 2}',
        '{"format": 99}',
        '{"format": 2, "problem": 1, "plan": 2}',
        "\xff",
    ],
)
def test_broken_files_are_named(text, tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ProblemError, match=r"broken\.json"):
        Plan.load(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ProblemError, match=r"absent\.json"):
        Plan.load(tmp_path / "absent.json")


def corrupt_order(document):
    document["plan"]["order"] = document["plan"]["order"][::-1]


def corrupt_offsets(document):
    document["plan"]["offsets"] = dict.fromkeys(document["plan"]["offsets"], 0)


def corrupt_buffer(document):
    document["plan"]["buffer_bytes"] = 64


def corrupt_peak(document):
    document["plan"]["peak_bytes"] += 64


def drop_offset(document):
    document["plan"]["offsets"].popitem()


@pytest.mark.parametrize(
    "corrupt",
    [corrupt_order, corrupt_offsets, corrupt_buffer, corrupt_peak, drop_offset],
    ids=lambda function: function.__name__,
)
def test_plans_that_break_their_problem_are_refused(plan, corrupt, tmp_path):
    document = json.loads(json.dumps(plan.to_json()))
    corrupt(document)
    with pytest.raises(ValidationError):
        Plan.from_json(document)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises((ValidationError, ProblemError)):
        Plan.load(path)


@pytest.mark.parametrize("field", ["problem", "plan", "baseline", "timings", "gradients"])
def test_missing_fields_are_refused(plan, field):
    document = plan.to_json()
    del document[field]
    with pytest.raises(ProblemError, match=field):
        Plan.from_json(document)


# Plots


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot(plan, suffix, start, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    plan.plot(path)
    assert path.read_bytes().startswith(start)


def test_snapshot_is_a_file_of_the_memory_viewer(plan, tmp_path):
    """Replaying its events never overlaps two blocks, and ends empty."""
    path = tmp_path / "snapshot.pickle"
    plan.to_snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    (segment,) = snapshot["segments"]
    assert segment["total_size"] == plan.buffer_bytes
    alive, most = {}, 0
    for event in snapshot["device_traces"][0]:
        lower, upper = event["addr"], event["addr"] + event["size"]
        assert segment["address"] <= lower
        assert upper <= segment["address"] + segment["total_size"]
        match event["action"]:
            case "alloc":
                assert all(upper <= other or lower >= end for other, end in alive.items())
                alive[lower] = upper
                most = max(most, sum(end - other for other, end in alive.items()))
            case "free_completed":
                assert alive.pop(lower) == upper
    assert not alive
    assert most == plan.peak_bytes


def test_the_memory_viewer_accepts_the_snapshot(plan, tmp_path):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    path = tmp_path / "snapshot.pickle"
    plan.to_snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    assert "alloc" in viewer.trace(snapshot)
    assert viewer.segsum(snapshot)
    assert (
        "<html" in viewer.trace_plot(snapshot).lower() or "<!doctype" in viewer.trace_plot(snapshot).lower()
    )


def test_a_plan_prints_as_one_line_and_reports_two_short_tables():
    model = mlp()
    plan = olla_fx.plan(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))
    for text in (repr(plan), str(plan), f"{plan}"):
        assert "\n" not in text
        assert len(text) < 120
        assert f"{len(plan.order)} operators" in text
        assert "proven smallest" in text
    for table in plan.report().split("\n\n"):
        lines = table.splitlines()
        assert len(lines) <= 16
        assert len({len(line) for line in lines}) == 1


def widened(self, x):
    return self.head(self.body(x).repeat(1, 50).exp().sum(1, True))


def test_a_report_says_where_what_is_at_the_peak_comes_from():
    model = Written(widened, body=nn.Linear(6, 4), head=nn.Linear(1, 3))
    plan = olla_fx.plan(model, vectors(1)[0][:1], baseline=False)
    line = widened.__code__.co_firstlineno + 1
    largest = plan.largest[0]
    assert largest.source == f"olla_fx/test_step_plan.py:{line}"
    assert f"at the peak: {largest.name}, made at {largest.source}" in plan.report()
    assert Plan.from_json(plan.to_json()).largest == plan.largest
