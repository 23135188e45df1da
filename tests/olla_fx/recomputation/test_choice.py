"""The choice of what backward computes again: within the share of time, eager's bits, and told."""

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import recomputation
from olla_fx.costs import PROFILES
from olla_fx.errors import CaptureError
from olla_fx.step_plan import Plan
from olla_solvers.errors import OptionError
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import images, sgd


def network():
    """Convolutions with batch norms and clamps in place: cheap to make again, and much to keep."""
    torch.manual_seed(0)
    layers, channels = [], 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        channels = 8
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def batches(count=3):
    return images(count, batch=4, size=24)


def plan(share, **options):
    example = batches(1)[0]
    model = network()
    return olla_fx.plan(
        model,
        example,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd(model.parameters()),
        recompute=share,
        **options,
    )


def test_more_time_needs_less_memory():
    plans = [plan(share, baseline=False, device_profile="a100") for share in (0, 0.05, 0.3)]
    peaks = [planned.peak_bytes for planned in plans]
    assert peaks[0] > peaks[1] > peaks[2]
    for planned, share in zip(plans, (0, 0.05, 0.3), strict=True):
        assert planned.extra_time <= share
        assert planned.is_optimal
        assert bool(planned.recomputed.operators) == (share > 0)
        assert planned.recomputed.saved_bytes == peaks[0] - planned.peak_bytes


def test_a_graph_that_takes_no_repetition_is_planned_without(monkeypatch, caplog):
    def refuse(*_):
        raise CaptureError("relu cannot run again")

    monkeypatch.setattr(recomputation, "with_repetitions", refuse)
    planned = plan(0.3, baseline=False, device_profile="a100")
    assert not planned.recomputed.operators
    assert planned.peak_bytes == plan(0, baseline=False).peak_bytes
    assert "nothing of the step is recomputed: relu cannot run again" in caplog.text


def test_a_whole_step_has_eagers_bits():
    loop = WholeStep(network(), sgd, batches()[0], recompute=0.5).run(batches())
    assert loop.step.plan.recomputed.operators
    code = loop.step.graph_module.code
    # A batch norm and the clamp behind it are made again as one.
    assert "batch_norm_again" in code
    assert code.count("relu_.default") == 4


def test_a_loop_of_ones_own_has_eagers_bits():
    loop = OwnLoop(network(), batches()[0][0], recompute=0.5).run(batches())
    loop.assert_served()
    assert loop.step.plan.recomputed.operators


def test_inference_recomputes_nothing():
    assert not olla_fx.plan(network().eval(), batches(1)[0][0], recompute=0.5).recomputed.operators


def test_a_plan_tells_what_it_recomputes(tmp_path):
    planned = plan(0.3, baseline=False, device_profile="a100")
    rows = dict(planned.rows())
    assert rows["recomputed in backward"].startswith(f"{planned.recomputed.operators} operators")
    assert "estimated for a100" in rows["extra time for it, predicted"]
    dearest = [name for name in rows if name.startswith("recomputed: ")]
    assert dearest
    assert all("made at" in name for name in dearest)
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").recomputed == planned.recomputed


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf"), True, "1%"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(OptionError, match="recompute is a share"):
        olla_fx.Options(recompute=share)


def test_an_unknown_device_is_refused_with_those_that_are_known():
    with pytest.raises(OptionError, match=next(iter(PROFILES))):
        plan(0.1, device_profile="abacus")
