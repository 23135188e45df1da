"""Tables for people: every figure with its unit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.report import format_bytes, format_table
from tests.olla_fx.helpers import mlp, sgd, vectors


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (64, "64 B"), (104_857, "104,857 B"), (104_858, "0.10 MiB"), (3 << 30, "3,072.00 MiB")],
)
def test_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_tables_are_aligned_columns():
    assert format_table([("a", "10 B"), ("long name", "7 B")]) == "a          10 B\nlong name   7 B"
    assert format_table([("", "a", "bc"), ("d", "e", "f")]) == "   a  bc\nd  e   f"
    assert format_table([]) == ""


def test_a_steps_report_says_plan_and_service():
    model = mlp()
    step = olla_fx.optimize(
        model,
        vectors(1)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        solver="none",
        fallback="raise",
    )
    for x, y in vectors(2):
        step(x, y)
    report = step.report()
    text = str(report)
    assert report.stats == step.stats
    assert report.stats.binding == "buffer"
    for expected in (
        "planned peak", "buffer", "lower bound", "fragmentation", "requests served in the buffer",
        "requests served outside, outputs", "requests served outside, unexpected",
        "requests on worker threads", "dispatched, with recorded workspaces",
        "seconds", "capture ", "order ", "place ",
    ):  # fmt: skip
        assert expected in text
    assert f"{step.stats.counts.served:,}" in text
    assert "not recorded" not in text


def own_loop(model, x, loss_fn):
    step = olla_fx.optimize(model, x, solver="none", fallback="raise")
    for _ in range(2):
        model.zero_grad()
        loss_fn(step(x)).backward()
    return step


def test_both_sides_count_the_gradients_and_outputs_of_a_loop():
    """Both hold all gradients when backward returns, the plan in the buffer, beside the loop's output."""
    model, x = nn.Linear(64, 256), torch.randn(8, 64)
    plan = own_loop(model, x, torch.sum).report().plan
    gradient_bytes, output_bytes = 4 * (64 * 256 + 256), 4 * 8 * 256
    for totals in (plan.totals, plan.eager_totals):
        assert totals.output_bytes == output_bytes
        assert totals.static_bytes == plan.static_bytes
        assert totals.without_workspaces_bytes <= totals.with_workspaces_bytes
        assert totals.gradient_bytes == gradient_bytes
    assert plan.gradient_bytes == 0, "they lie in the buffer"
    assert gradient_bytes <= plan.buffer_bytes
    assert plan.total_bytes == plan.static_bytes + output_bytes + plan.buffer_bytes
    assert plan.totals.with_workspaces_bytes == plan.total_bytes


def test_a_whole_step_has_its_gradients_in_the_buffer():
    model = mlp(64)
    plan = olla_fx.plan(
        model, vectors(1, width=64)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters())
    )
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (plan.totals.gradient_bytes, plan.eager_totals.gradient_bytes) == (0, gradient_bytes)
    assert plan.totals.with_workspaces_bytes is plan.eager_totals.with_workspaces_bytes is None
    assert plan.totals.without_workspaces_bytes == plan.total_bytes
    assert "not recorded" in plan.report()


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"clip_grad_value": 1.0}])
def test_eager_clips_without_a_second_set_of_gradients(options):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 3))
    example = vectors(1, width=256)[0]
    plan = olla_fx.plan(
        model, example, loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), solver="none", **options
    )
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert gradient_bytes <= plan.baseline.live_peak_bytes < 1.2 * gradient_bytes


def test_eagers_workspaces_are_those_of_the_recorded_run():
    model, x = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)), torch.randn(4, 3, 32, 32)
    step = own_loop(model, x, torch.sum)
    model.zero_grad()
    with olla_fx.record() as recording:
        output = model(x)
        output.sum().backward()
    followed, recorded = step.report().plan, step.report(recording).plan
    assert followed.baseline == recorded.baseline
    assert followed.baseline.source == "dispatched"
    assert followed.baseline_with_workspaces.source == "dispatched, with recorded workspaces"
    assert recorded.baseline_with_workspaces.source == "recorded"
    bytes_of = [plan.baseline_with_workspaces.live_peak_bytes for plan in (followed, recorded)]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=0.02)
    assert bytes_of[0] > 1.02 * followed.baseline.live_peak_bytes


def test_an_empty_recording_is_refused():
    step = own_loop(nn.Linear(3, 3), torch.ones(2, 3), torch.sum)
    with olla_fx.record() as recording:
        pass
    with pytest.raises(olla_fx.RecordingError, match="nothing was recorded"):
        step.report(recording)


def test_a_plan_tells_its_baseline_and_gap():
    plan = olla_fx.plan(mlp().eval(), torch.ones(4, 6), solver="none")
    rows = dict(plan.rows())
    assert rows["planned peak"] == format_bytes(plan.peak_bytes)
    assert rows["eager's step"] == "dispatched"
    assert rows["optimal"] == "yes, proven"
