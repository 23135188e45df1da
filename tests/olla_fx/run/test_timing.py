"""After a recorded run operators are measured, if it matters; the step has eager's bits all the same."""

import pytest
import torch

from olla_fx import disk_cache
from olla_fx.costs import measure_kinds, operator_seconds, read_measurements
from olla_fx.fx_graph import REPEATED
from olla_fx.link import is_transfer
from olla_fx.run import timing
from olla_fx.swapping import swap_problem, with_transfers
from olla_solvers.order import order_quickly
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, SmallNet, captured_training, front, images, mlp, vectors
from tests.olla_fx.transfers import FAST, all_that_can

CPU = torch.device("cpu")


@pytest.fixture
def _kept(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path))


@pytest.fixture
def asked(monkeypatch):
    """What measuring was asked for."""
    calls = []

    def measure(*arguments):
        calls.append(arguments)
        return measure_kinds(*arguments)

    monkeypatch.setattr(timing, "measure_kinds", measure)
    return calls


@pytest.mark.usefixtures("_kept")
def test_a_whole_step_is_measured_once(asked):
    batches = images(4)
    step = WholeStep(SmallNet(), ADAMW, batches[0], recompute=0.01)
    for batch in batches:
        step.train(batch)
    assert len(asked) == 1
    assert read_measurements(CPU)


@pytest.mark.usefixtures("_kept")
def test_what_is_known_is_not_measured_again(asked, monkeypatch):
    monkeypatch.setattr(timing, "ENOUGH_MEASURED", 0.01)
    for _ in range(2):
        WholeStep(SmallNet(), ADAMW, images(1)[0], recompute=0.01).train(images(1)[0])
    assert len(asked) == 1


@pytest.mark.usefixtures("_kept")
def test_a_loop_of_ones_own_is_measured(asked):
    batches = images(4)
    loop = OwnLoop(SmallNet(), batches[0][0], recompute=0.01)
    for batch in batches:
        loop.train(batch)
    assert asked
    assert read_measurements(CPU)


@pytest.mark.usefixtures("_kept")
def test_time_and_memory_are_bounded(asked):
    step = WholeStep(SmallNet(), ADAMW, images(1)[0], recompute=0.01)
    step.train(images(1)[0])
    ((dataflow, known, seconds, requests, most_bytes),) = asked
    assert known == {}
    assert seconds == timing.ALWAYS_SECONDS  # of a step that takes milliseconds
    assert requests.keys() == {operator.name for operator in dataflow.problem.operators}
    assert 0 < most_bytes <= step.step.plan.peak_bytes


@pytest.mark.usefixtures("_kept")
def test_without_recomputation_nothing_is_measured(asked):
    step = WholeStep(SmallNet(), ADAMW, images(1)[0], recompute=0)
    for batch in images(2):
        step.train(batch)
    assert not asked
    assert not read_measurements(CPU)


def test_where_nothing_is_kept_nothing_is_measured(asked):
    step = WholeStep(SmallNet(), ADAMW, images(1)[0], recompute=0.01)
    for batch in images(2):
        step.train(batch)
    assert not asked


def test_waiting_for_copies_is_not_taken_for_computing():
    dataflow = front(captured_training(mlp(), vectors(1)[0]))
    order = order_quickly(dataflow.problem).order
    stated = swap_problem(dataflow, order, operator_seconds(dataflow), FAST)
    swapped = with_transfers(dataflow, stated, all_that_can(stated))
    computing = [node for node in swapped.operators if not is_transfer(node)]
    assert len(computing) < len(swapped.operators)
    computing[-1].meta[REPEATED] = True
    names = [node.name for node in swapped.operators]
    seconds = dict.fromkeys(range(len(names)), 1.0)
    assert timing.extra_time_of(swapped, names, seconds) == 1 / (len(computing) - 1)
