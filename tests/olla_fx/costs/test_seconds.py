"""Estimates and measurements are in one unit, and it is told which is which."""

import pytest
import torch
from torch import nn

from olla_fx.costs import PROFILES, Measurement, operator_seconds, work_of
from olla_fx.costs.kinds import kind_of, operator_name
from olla_fx.costs.seconds import CAUTION
from tests.olla_fx.helpers import Written, captured_training, front, images, vectors


@pytest.fixture
def dataflow():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
    return front(captured_training(model, images(1)[0]))


def measured(dataflow, factor, wanted):
    """Say of some operators that they take so many times what is estimated."""
    costs = operator_seconds(dataflow, measurements={})
    return {
        kind_of(node): Measurement(operator_name(node), work_of(node, dataflow.device), factor * seconds)
        for node, seconds in zip(dataflow.operators, costs.seconds, strict=True)
        if wanted(node)
    }


def test_what_was_measured_is_taken(dataflow):
    estimated = operator_seconds(dataflow, measurements={})
    assert estimated.source == "estimated"
    assert estimated.told == "estimated for cpu"
    everything = measured(dataflow, 3, lambda node: True)
    costs = operator_seconds(dataflow, measurements=everything)
    assert costs.seconds == pytest.approx([3 * seconds for seconds in estimated.seconds])
    assert costs.measured_share == pytest.approx(1)
    assert costs.source == "measured"
    assert costs.told.startswith("100% of the seconds measured here")


def test_others_are_estimated_by_their_operator_then_their_class(dataflow):
    estimated = operator_seconds(dataflow, measurements={})
    first = next(node for node in dataflow.operators if operator_name(node) == "convolution")
    costs = operator_seconds(dataflow, measurements=measured(dataflow, 3, lambda node: node is first))
    for node, seconds, before in zip(dataflow.operators, costs.seconds, estimated.seconds, strict=True):
        computes = work_of(node, dataflow.device).flops > 0
        assert seconds == pytest.approx(3 * before if computes else before)
    of_both = {
        **measured(dataflow, 3, lambda node: node is first),
        **measured(dataflow, 5, lambda node: operator_name(node) == "mm"),
    }
    costs = operator_seconds(dataflow, measurements=of_both)
    for node, seconds, before in zip(dataflow.operators, costs.seconds, estimated.seconds, strict=True):
        if operator_name(node) == "convolution":
            assert seconds == pytest.approx(3 * before)


def fractions(self, x):
    return self.last(self.first(x).frac().relu())


def test_a_repetition_is_taken_to_be_dear_if_nothing_is_known_of_it():
    model = Written(fractions, first=nn.Linear(6, 8), last=nn.Linear(8, 3))
    dataflow = front(captured_training(model, vectors(1)[0]))
    (unknown,) = (node for node in dataflow.operators if operator_name(node) == "frac")

    def factors(measurements):
        costs = operator_seconds(dataflow, measurements=measurements)
        pairs = zip(dataflow.operators, costs.seconds, costs.again_seconds, strict=True)
        told = {"frac", "relu", "addmm"}
        return {node: again / seconds for node, seconds, again in pairs if operator_name(node) in told}

    estimated = factors({})
    assert estimated.pop(unknown) == pytest.approx(CAUTION)
    assert set(estimated.values()) == {1.0}
    assert set(factors(measured(dataflow, 3, lambda node: node is unknown)).values()) == {1.0}


def test_of_a_device_that_is_not_there_nothing_was_measured(dataflow):
    everything = measured(dataflow, 3, lambda node: True)
    costs = operator_seconds(dataflow, PROFILES["h100"], everything)
    assert costs == operator_seconds(dataflow, PROFILES["h100"])
    assert costs.told == "estimated for h100"


def test_threads_count(dataflow):
    one = operator_seconds(dataflow, measurements={}).step_seconds
    torch.set_num_threads(2)
    assert operator_seconds(dataflow, measurements={}).step_seconds < one
