"""What is to wait on the host, chosen together with repetitions, does so in the graph that has these."""

import itertools

import pytest
import torch

from olla_fx import compile as pipeline
from olla_fx.errors import SwapError
from olla_fx.recomputation import RecomputableStep
from olla_fx.recomputation.problem import with_repetitions
from olla_fx.recomputation.transfers import transfers_of_repeated
from olla_fx.swapping import swap_problem, with_transfers
from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.least_memory import least_memory
from olla_solvers.swapping.transfers import Transfer
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import MOMENTUM
from tests.olla_fx.recomputation.models import MODELS
from tests.olla_fx.transfers import FAST, SLOW, swapping


def uses_of_copies(problem, executions):
    """Return the positions in a sequence at which each copy of an array is made and read."""
    uses = {}
    for position, execution in enumerate(executions):
        copies = dict(execution.sources)
        for index, array in enumerate(problem.arrays):
            if array.kind is not ArrayKind.PLANNED:
                continue
            if array.producer == execution.operator:
                uses.setdefault((index, execution.copy), []).append(position)
            elif execution.operator in array.consumers:
                copy = copies.get(array.producer, 0)
                uses.setdefault((index, copy), []).append(position)
    return uses


def chosen_beside(problem, executions, least_gap=6):
    """Let every copy of an array wait between two uses that are far apart."""
    transfers = []
    for (array, copy), positions in uses_of_copies(problem, executions).items():
        for first, later in itertools.pairwise(positions):
            if later - first >= least_gap:
                transfers.append(Transfer(first, first + 2, later - 2, later, array, copy))
    return transfers


def jointly(request):
    """Return what plans a step with repetitions and transfers at once, in the place of recomputation."""

    def plan(rewriting, candidate, share, profile=None):
        step = RecomputableStep.of(rewriting, candidate, profile)
        answer = least_memory(step.problem, 0.5 * step.problem.step_seconds)
        kept = step.kept.dataflow
        repeated = with_repetitions(kept, answer.executions, step.probe)
        transfers = chosen_beside(kept.problem, answer.executions)
        names = {operator.name: index for index, operator in enumerate(repeated.dataflow.problem.operators)}
        order = [names[name] for name in repeated.order]
        stated = swap_problem(repeated.dataflow, order, step.costs, FAST)
        moved = [
            transfer
            for transfer in transfers_of_repeated(kept, answer.executions, repeated, transfers)
            if transfer.array in stated.may_wait
        ]
        request.append((answer, transfers, moved))
        dataflow = with_transfers(repeated.dataflow, stated, moved)
        return rewriting.ordered(pipeline.Candidate(dataflow, step.kept.changes))

    return plan


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
@pytest.mark.parametrize("name", ["residual", "skip", "transformer"])
def test_steps_of_both_equal_eager(kind, name, monkeypatch):
    told = []
    monkeypatch.setattr(pipeline, "choose_recomputation", jointly(told))
    monkeypatch.setattr(pipeline, "choose_sharing", lambda rewriting, candidate: candidate)
    make, batches = MODELS[name]
    torch.manual_seed(0)
    nothing = swapping(SLOW, choose=lambda stated: [])
    if kind is WholeStep:
        loop = WholeStep(make(), MOMENTUM, batches(1)[0], swap=nothing, runs_to_settle=2)
    else:
        loop = OwnLoop(make(), batches(1)[0][0], swap=nothing)
    loop.run(batches(4))
    assert_served(loop.step)
    answer, _, moved = told[0]
    assert answer.dropped
    assert moved
    assert loop.step.plan.host_bytes


def test_what_is_not_there_is_refused():
    told = []

    class Stop(Exception):
        pass

    make, batches = MODELS["residual"]
    with pytest.MonkeyPatch.context() as patch:

        def keep(rewriting, candidate, share, profile=None):
            step = RecomputableStep.of(rewriting, candidate, profile)
            answer = least_memory(step.problem, 0.5 * step.problem.step_seconds)
            told.append(
                (
                    step.kept.dataflow,
                    answer,
                    with_repetitions(step.kept.dataflow, answer.executions, step.probe),
                )
            )
            raise Stop

        patch.setattr(pipeline, "choose_recomputation", keep)
        with pytest.raises(Stop):
            WholeStep(make(), MOMENTUM, batches(1)[0])
    kept, answer, repeated = told[0]
    index = answer.dropped[0]
    with pytest.raises(SwapError, match="nothing makes copy 9"):
        transfers_of_repeated(kept, answer.executions, repeated, [Transfer(1, 3, 5, 7, index, 9)])
    static = next(i for i, array in enumerate(kept.problem.arrays) if array.producer is None)
    with pytest.raises(SwapError, match="no operator makes it"):
        transfers_of_repeated(kept, answer.executions, repeated, [Transfer(1, 3, 5, 7, static)])
    assert len(repeated.runs) == len(answer.executions)
