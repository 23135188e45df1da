"""Arguments that make no sense are refused before anything runs."""

import pytest
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError
from olla_solvers.errors import OptionError, SolverUnavailableError
from tests.olla_fx.capture.refusals import refused
from tests.olla_fx.helpers import mlp, sgd, vectors


def test_missing_and_superfluous_arguments():
    x, y = vectors(1)[0]
    model = mlp()
    optimizer = sgd(model.parameters())
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(CaptureError, match="needs both loss_fn and optimizer"):
            function(model, (x, y), optimizer=optimizer)
        with pytest.raises(CaptureError, match="needs both loss_fn and optimizer"):
            function(model, (x, y), loss_fn=F.cross_entropy)
        with pytest.raises(CaptureError, match="last element is the target"):
            function(model, x, loss_fn=F.cross_entropy, optimizer=optimizer)
        with pytest.raises(OptionError, match="no option 'mode'"):
            function(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, mode="training")
        with pytest.raises(CaptureError, match=r"eval mode.*model\.train\(\)"):
            function(model.eval(), (x, y), loss_fn=F.cross_entropy, optimizer=optimizer)
        model.train()


def test_an_unknown_solver_is_refused_before_anything_runs():
    refused(mlp(), "cplex", SolverUnavailableError, solver="cplex")


@pytest.mark.parametrize("time_limit", [-1, float("nan"), "3", True])
def test_time_limits(time_limit):
    refused(mlp(), "at least 0, or None; not", OptionError, time_limit=time_limit)


def test_an_unknown_solver_is_refused_before_capturing():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(SolverUnavailableError, match="unknown solver 'scip'; one of auto, cbc"):
        olla_fx.optimize(
            model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=None, solver="scip", fallback="raise"
        )
