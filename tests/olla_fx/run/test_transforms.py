"""Function transforms, checkpoints and hooks for saved tensors around a planned module."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import olla_fx
from olla_fx import StepModeError
from olla_fx.errors import BackwardError
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors


def planned_mlp():
    model = mlp()
    return model, olla_fx.optimize(model, vectors(1)[0][0], solver="none", fallback="raise")


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
            torch.func.grad(lambda values, m=m: torch.func.functional_call(m, values, (x,)).sum())(parameters)
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
    assert not planned.stats.is_busy


def test_a_whole_step_is_not_transformed():
    model = mlp()
    x, y = vectors(1)[0]
    step = olla_fx.optimize(
        model, (x, y), loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), fallback="raise"
    )
    before = copy.deepcopy(model)
    with pytest.raises(StepModeError, match=r"torch\.func"):
        torch.vmap(step)(x[None], y[None])
    assert_same_models(before, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_torchscript_is_the_models():
    """It looked at what the plan does, and ended in an error from within C++."""
    model, planned = planned_mlp()
    batches = vectors(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(planned, batches[0][0])
    for x, _ in batches:
        assert_same(model(x), traced(x), "answer")
    assert [*traced.state_dict()] == [*model.state_dict()]
    planned(batches[0][0])
    assert planned.stats.binding == "buffer"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_whole_step_is_not_traced_by_torchscript():
    model = mlp()
    x, y = vectors(1)[0]
    step = olla_fx.optimize(model, (x, y), loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))
    before = copy.deepcopy(model)
    with pytest.raises(StepModeError, match=r"torch\.jit"):
        torch.jit.trace(step, (x, y))
    assert_same_models(before, model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:a planned module is called within")
def test_a_checkpoint_around_a_planned_module(use_reentrant):
    """Eager recomputes, and so updates the statistics twice."""
    pair = OwnLoop(SmallNet(), images(1)[0][0].requires_grad_())
    for index, (x, y) in enumerate(images(20)):
        for module in (pair.eager, pair.step):
            torch.manual_seed(index)
            inputs = x.clone().requires_grad_()
            F.cross_entropy(checkpoint(module, inputs, use_reentrant=use_reentrant), y).backward()
        pair.compare_gradients()
    assert_same_models(pair.eager, pair.model)
    assert not pair.step.stats.is_busy


def test_hooks_for_saved_tensors():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    with save_on_cpu(), pytest.warns(RuntimeWarning, match="without its plan"):
        pair.run(images(2))
    pair.run(images(3)).assert_served()


def test_planning_under_hooks_for_saved_tensors():
    """They are for the caller's tensors, not for those of a trace."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        pair = WholeStep(SmallNet(), sgd, images(1)[0])
        assert not seen
        pair.run(images(2))
    pair.run(images(2))
