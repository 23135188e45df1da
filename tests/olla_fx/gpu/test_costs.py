"""On a GPU operators are timed by events, and the generator is left as it was."""

import torch

from olla_fx.costs import measure_kinds, operator_seconds
from tests.olla_fx.helpers import SmallNet, captured_training, front, images


def test_a_whole_step_can_be_measured(device):
    x, y = images(1)[0]
    dataflow = front(captured_training(SmallNet().to(device), (x.to(device), y.to(device))))
    before = torch.cuda.get_rng_state(device)
    measured = measure_kinds(dataflow, {}, 60.0)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert all(0 < item.seconds < 1 for item in measured.values())
    assert operator_seconds(dataflow, measurements=measured).measured_share > 0.8
