"""Tables for people: every figure with its unit."""

import pytest
import torch
import torch.nn.functional as F

import olla_fx
from olla_fx.report import format_bytes, format_table
from tests.olla_fx.helpers import mlp, sgd, vectors


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (64, "64 B"), (104_857, "104,857 B"), (104_858, "0.10 MiB"), (3 << 30, "3,072.00 MiB")],
)
def test_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_tables_are_two_aligned_columns():
    assert format_table([("a", "10 B"), ("long name", "7 B")]) == "a          10 B\nlong name   7 B"
    assert format_table([]) == ""


def test_a_steps_report_says_plan_and_service():
    model = mlp()
    step = olla_fx.optimize(
        model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), solver="none"
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
        "requests on worker threads",
        "seconds", "capture 0.", "order 0.", "place 0.",
    ):  # fmt: skip
        assert expected in text
    assert f"{step.stats.counts.served:,}" in text


def test_a_plan_tells_its_baseline_and_gap():
    plan = olla_fx.plan(mlp().eval(), torch.ones(4, 6), solver="none")
    rows = dict(plan.rows())
    assert rows["planned peak"] == format_bytes(plan.peak_bytes)
    assert any("eager" in name for name in rows)
    assert rows["optimal"] == "yes, proven"
