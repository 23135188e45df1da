"""Steps that no CUDA graph can hold are refused. Tests on a GPU check what graphs compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import CaptureError, UnsupportedOptimizerError
from olla_fx.capture import Mode, StepRequest
from olla_fx.run.cuda_graph import check_graph_request

CUDA = torch.device("cuda")


def request(make_optimizer, **options) -> StepRequest:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters(), **options)
    return StepRequest(model, (), Mode.TRAINING, F.cross_entropy, optimizer)


def test_a_graph_on_the_cpu_is_refused_by_name():
    model = nn.Linear(3, 2).eval()
    with pytest.raises(CaptureError, match="needs model and inputs on a CUDA device; they are on cpu"):
        olla_fx.optimize(model, torch.zeros(1, 3), cuda_graph=True, fallback="raise")


def test_a_graph_of_the_callers_own_loop_is_refused():
    with pytest.raises(CaptureError, match="a whole training step or an inference"):
        check_graph_request(StepRequest(nn.Linear(3, 2), (), Mode.AUTOGRAD), CUDA)


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["neither", "a number as learning rate"])
def test_an_optimizer_that_keeps_numbers_on_the_host_is_refused(options):
    with pytest.raises(
        UnsupportedOptimizerError, match="capturable=True and a tensor as learning rate: Adam"
    ):
        check_graph_request(request(optim.Adam, lr=1e-3, **options), CUDA)


def test_an_optimizer_without_a_form_for_graphs_is_refused():
    with pytest.raises(UnsupportedOptimizerError, match="Adagrad counts its steps in numbers on the host"):
        check_graph_request(request(optim.Adagrad), CUDA)


@pytest.mark.parametrize(
    "step_request",
    [
        StepRequest(nn.Linear(3, 2), (), Mode.INFERENCE),
        request(optim.SGD, lr=0.1),
        request(optim.Adam, lr=torch.tensor(1e-3), capturable=True, foreach=False),
        request(optim.Rprop, capturable=True),
    ],
    ids=["inference", "SGD", "Adam", "Rprop"],
)
def test_a_step_that_a_graph_can_hold_is_accepted(step_request):
    check_graph_request(step_request, CUDA)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_arithmetic_for_graphs_is_refused_outside_of_cuda(name):
    model = nn.Linear(3, 2)
    optimizer = getattr(optim, name)(model.parameters(), capturable=True)
    batch = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(UnsupportedOptimizerError, match="capturable=True outside of CUDA"):
        olla_fx.optimize(model, batch, loss_fn=F.cross_entropy, optimizer=optimizer, fallback="raise")
