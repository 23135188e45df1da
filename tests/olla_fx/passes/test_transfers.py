"""The graph with transfers: where they stand, who reads what, and what is refused."""

import random

import pytest
import torch
from torch import nn

from olla_fx.costs import operator_seconds
from olla_fx.dataflow import GradientsInBuffer, build_dataflow
from olla_fx.errors import SwapError
from olla_fx.link import is_transfer, offload, offload_wait, reload, reload_wait, waits_for
from olla_fx.swapping import swap_problem, with_transfers
from olla_solvers.analysis import timesteps
from olla_solvers.errors import ProblemError
from olla_solvers.order import order_quickly
from olla_solvers.planner import make_plan
from olla_solvers.problem import ArrayKind
from olla_solvers.swapping.transfers import Transfer, away_bytes, host_bytes
from tests.olla_fx.helpers import captured_training, front, mlp, vectors
from tests.olla_fx.transfers import FAST, all_that_can, far_ones


@pytest.fixture(scope="module")
def step():
    """Return the dataflow of a step, and what of it may wait."""
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), nn.Sigmoid())])
    dataflow = front(captured_training(model, vectors(1)[0]))
    order = order_quickly(dataflow.problem).order
    return dataflow, swap_problem(dataflow, order, operator_seconds(dataflow), FAST)


def test_operators_keep_their_sequence(step):
    dataflow, stated = step
    names = [stated.problem.operators[index].name for index in stated.order]
    swapped = with_transfers(dataflow, stated, all_that_can(stated))
    order = make_plan(swapped.problem, solver="none").order
    transfers = {node.name for node in swapped.operators if is_transfer(node)}
    assert [name for name in order if name not in transfers] == names


def test_transfers_stand_at_their_boundaries(step):
    dataflow, stated = step
    chosen = far_ones(stated)
    swapped = with_transfers(dataflow, stated, chosen)
    timestep, timesteps_of = 0, {offload: [], offload_wait: [], reload: [], reload_wait: []}
    for node in swapped.operators:
        if is_transfer(node):
            timesteps_of[node.target].append(timestep)
        else:
            timestep += 1
    assert timesteps_of == {
        offload: sorted(transfer.out_after + 1 for transfer in chosen),
        offload_wait: sorted(transfer.gone_before for transfer in chosen),
        reload: sorted(transfer.back_from for transfer in chosen),
        reload_wait: sorted(transfer.back_before for transfer in chosen),
    }


def test_copies_that_begin_together_come_in_the_sequence_of_the_transfers(step):
    dataflow, stated = step
    chosen = all_that_can(stated)
    random.Random(0).shuffle(chosen)
    assert len({transfer.array for transfer in chosen}) < len(chosen)
    begins, timestep = {offload: [], reload: []}, 0
    for node in with_transfers(dataflow, stated, chosen).operators:
        if node.target in begins:
            begins[node.target].append((timestep, node.args[1]))
        timestep += not is_transfer(node)
    assert begins == {
        offload: sorted((transfer.out_after + 1, number) for number, transfer in enumerate(chosen)),
        reload: sorted((transfer.back_from, number) for number, transfer in enumerate(chosen)),
    }


def test_memory_is_free_while_an_array_is_away(step):
    dataflow, stated = step
    chosen = far_ones(stated)
    swapped = with_transfers(dataflow, stated, chosen)
    plan = make_plan(swapped.problem, solver="none")
    sizes = [stated.problem.arrays[transfer.array].size_bytes for transfer in chosen]
    assert plan.host_bytes <= max(host_bytes(chosen, sizes, len(stated.order)))
    assert sum(away_bytes(chosen, sizes, len(stated.order))) > 0
    plain = make_plan(stated.problem, solver="none")
    assert plan.peak_bytes < plain.peak_bytes


def test_copies_are_told_to_the_validator(step):
    dataflow, stated = step
    chosen = all_that_can(stated)
    swapped = with_transfers(dataflow, stated, chosen)
    operators = swapped.operators
    pairs = [(operators[begin], operators[wait]) for begin, wait in swapped.problem.copies]
    assert len(pairs) == 2 * len(chosen)
    assert all(waits_for(wait) is begin for begin, wait in pairs)
    on_host = [array for array in swapped.problem.arrays if array.kind is ArrayKind.HOST]
    assert len(on_host) == len(chosen)


def test_the_given_graph_stays_as_it_is(step):
    dataflow, stated = step
    before = dataflow.graph_module.code
    with_transfers(dataflow, stated, all_that_can(stated))
    assert dataflow.graph_module.code == before


def test_transfers_take_no_time_themselves(step):
    dataflow, stated = step
    swapped = with_transfers(dataflow, stated, all_that_can(stated))
    costs = operator_seconds(swapped)
    assert costs.step_seconds == pytest.approx(operator_seconds(dataflow).step_seconds)


def test_other_gradients_in_the_buffer_keep_the_sequence(step):
    dataflow, stated = step
    swapped = with_transfers(dataflow, stated, all_that_can(stated))
    again = build_dataflow(swapped.graph_module, swapped.device, GradientsInBuffer())
    assert again.problem == swapped.problem


def one(stated, **changes):
    """Return an array's transfer with changes."""
    chosen = far_ones(stated)[0]
    fields = {name: getattr(chosen, name) for name in Transfer.__slots__}
    return [Transfer(**{**fields, **changes})]


def test_what_is_not_sound_is_refused(step):
    dataflow, stated = step
    chosen = far_ones(stated)[0]
    array = stated.problem.arrays[chosen.array]
    static = next(i for i, array in enumerate(stated.problem.arrays) if array.kind is ArrayKind.STATIC)
    made = timesteps(stated.order)[array.producer]
    cases = [
        (one(stated, array=static), "cannot wait on the host"),
        (one(stated, array=10**6), "has no array"),
        (one(stated, copy=1), "has no copies"),
        (one(stated, back_before=chosen.back_before + 1), "while it is on the host"),
        (one(stated, out_after=chosen.out_after - 1), "while it is on the host|not made yet"),
        (one(stated, out_after=0, gone_before=1), "not made yet") if made else None,
        ([chosen, chosen], "before it is back"),
    ]
    for transfers, words in filter(None, cases):
        with pytest.raises(SwapError, match=words):
            with_transfers(dataflow, stated, transfers)
    with pytest.raises(ProblemError, match="no time for"):
        with_transfers(dataflow, stated, one(stated, gone_before=chosen.out_after))


def test_nothing_of_the_callers_may_wait(step):
    _, stated = step
    arrays = stated.problem.arrays
    assert all(arrays[index].kind is ArrayKind.PLANNED for index in stated.may_wait)
    assert stated.may_wait


def test_between_two_steps_nothing_may_wait(step):
    dataflow, stated = step
    length = len(stated.order)
    index = max(stated.may_wait, key=lambda i: max(stated.problem.arrays[i].consumers, default=0))
    array = stated.problem.arrays[index]
    at = timesteps(stated.order)
    uses = sorted({at[array.producer], *(at[consumer] for consumer in array.consumers)})
    around = Transfer(uses[-1], length, length + uses[0], length + uses[0], index)
    if uses[-1] + 1 < length:
        around = Transfer(uses[-1], uses[-1] + 1, length, length, index)
    with pytest.raises(SwapError, match="between two steps"):
        with_transfers(dataflow, stated, [around])


def test_views_in_the_middle_of_a_storage_come_back_there():
    """Slices of one storage, transposed, of which two are read late."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(6, 12), nn.Linear(4, 3)

        def forward(self, x):
            first, second, third = self.layer(x).sin().view(-1, 3, 4).unbind(1)
            return self.last((first * second).tanh() @ (third.t() @ third) * second)

    dataflow = front(captured_training(Sliced(), vectors(1)[0]))
    order = order_quickly(dataflow.problem).order
    stated = swap_problem(dataflow, order, operator_seconds(dataflow), FAST)
    swapped = with_transfers(dataflow, stated, all_that_can(stated))
    before = {node.name: node for node in dataflow.operators}
    for node in swapped.operators:
        if is_transfer(node):
            continue
        for mine, other in zip(node.all_input_nodes, before[node.name].all_input_nodes, strict=True):
            one, another = mine.meta.get("val"), other.meta.get("val")
            if isinstance(one, torch.Tensor):
                assert (one.shape, one.stride(), one.storage_offset(), one.dtype) == (
                    another.shape,
                    another.stride(),
                    another.storage_offset(),
                    another.dtype,
                )


def test_models_without_gaps_have_nothing_to_choose():
    dataflow = front(captured_training(mlp(), vectors(1)[0]))
    order = order_quickly(dataflow.problem).order
    stated = swap_problem(dataflow, order, operator_seconds(dataflow), FAST)
    assert set(all_that_can(stated, least_gap=10**6)) == set()
