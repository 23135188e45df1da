"""A planned module within what its caller puts around it: transforms, hooks for saved tensors, attributes."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import olla_fx
from olla_fx import StepInputError, StepModeError
from olla_fx.errors import BackwardError
from tests.olla_fx.helpers import SmallNet, Twins, assert_same, assert_same_models, images, mlp, sgd, vectors
from tests.olla_fx.run.test_own_loop import Loops


def planned_mlp():
    model = mlp()
    return model, olla_fx.optimize(model, vectors(1)[0][0], solver="none")


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_vmap(context):
    model, planned = planned_mlp()
    x = torch.randn(5, 4, 6)
    with context():
        for _ in range(3):
            assert_same(torch.vmap(model)(x).detach(), torch.vmap(planned)(x).detach(), "answer")


def test_gradients_by_torch_func():
    model, planned = planned_mlp()
    x, parameters = vectors(1)[0][0], dict(model.named_parameters())
    for _ in range(3):
        expected, given = (
            torch.func.grad(lambda each, m=m: torch.func.functional_call(m, each, (x,)).sum())(parameters)
            for m in (model, planned)
        )
        assert_same(expected, given, "gradients")


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_forward_mode_differentiation(context):
    """Its tangents were lost without a word."""
    model, planned = planned_mlp()
    for x, _ in vectors(3):
        with context(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            expected, given = (forward_ad.unpack_dual(module(dual)) for module in (model, planned))
            assert given.tangent is not None
            assert_same(expected.primal.detach(), given.primal.detach(), "answer")
            assert_same(expected.tangent.detach(), given.tangent.detach(), "tangent")


def test_several_backwards_at_once_are_refused():
    model, planned = planned_mlp()
    x = vectors(1)[0][0]
    answer = planned(x)
    with pytest.raises(BackwardError, match="is_grads_batched"):
        torch.autograd.grad(answer, model[0].weight, torch.randn(7, 4, 3), is_grads_batched=True)
    assert not planned.is_busy


def test_a_whole_step_is_not_transformed():
    model = mlp()
    x, y = vectors(1)[0]
    step = olla_fx.optimize(model, (x, y), loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))
    before = copy.deepcopy(model)
    with pytest.raises(StepModeError, match=r"torch\.func"):
        torch.vmap(step)(x[None], y[None])
    assert_same_models(before, model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:a planned module is called within")
def test_a_checkpoint_around_a_planned_module(use_reentrant):
    """Eager recomputes, and so updates the statistics twice."""
    loops = Loops(SmallNet(), images(1)[0][0].requires_grad_())
    for index, (x, y) in enumerate(images(20)):
        for module in (loops.eager, loops.planned):
            torch.manual_seed(index)
            inputs = x.clone().requires_grad_()
            F.cross_entropy(checkpoint(module, inputs, use_reentrant=use_reentrant), y).backward()
        loops.compare_gradients()
    assert_same_models(loops.eager, loops.model)
    assert not loops.planned.is_busy


def test_hooks_for_saved_tensors():
    loops = Loops(SmallNet(), images(1)[0][0])
    with save_on_cpu(), pytest.warns(RuntimeWarning, match="without its plan"):
        loops.run(images(2))
    loops.run(images(3)).assert_served()


def test_planning_under_hooks_for_saved_tensors():
    """They are for the caller's tensors, not for those of a trace."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        twins = Twins(SmallNet(), sgd, images(1)[0])
        assert not seen
        twins.run(images(2))
    twins.run(images(2))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 3), 2.0

    def forward(self, x, shift=0.0, *, negate=False):
        answer = self.body(x) * self.scale + shift
        return -answer if negate else answer

    def grow(self):
        self.scale *= 2

    @property
    def width(self):
        return self.body.out_features


def test_attributes_of_the_model():
    """One that is set on the planned module alone would change nothing."""
    model = Scaled()
    eager = copy.deepcopy(model)
    x = vectors(1)[0][0]
    planned = olla_fx.optimize(model, x, solver="none")
    for change in (
        lambda module: None,
        lambda module: setattr(module, "scale", 3.0),
        lambda module: module.grow(),
        lambda module: setattr(module, "body", copy.deepcopy(eager.body)),
    ):
        for module in (eager, planned):
            change(module)
        assert_same(eager(x).detach(), planned(x).detach(), "answer")
    assert planned.scale == model.scale == 6.0
    assert planned.width == 3
    planned.note = "mine"
    assert not hasattr(model, "note")
    assert copy.deepcopy(planned).note == "mine"
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'nothing'"):
        planned.nothing  # noqa: B018


def test_inputs_that_are_taken_by_name_only_may_be_left_out():
    model = Scaled()
    x = vectors(1)[0][0]
    planned = olla_fx.optimize(model, x, solver="none")
    assert_same(model(x=x, shift=1.0).detach(), planned(x=x, shift=1.0).detach(), "answer")
    assert_same(model(x, shift=1.0).detach(), planned(x, shift=1.0).detach(), "answer")
    with pytest.raises(StepInputError, match="'negate' by name only"):
        planned(x, negate=True)
