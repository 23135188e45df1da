"""A captured graph holds every tensor by name, and nothing that a plan does not need."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from olla_fx.capture import Mode, Role, StepRequest, capture
from tests.olla_fx.helpers import SmallNet, captured_training, images, mlp, vectors


def names(captured, role):
    return [step_input.name for step_input in captured.inputs if step_input.role is role]


def targets(captured):
    return [str(node.target) for node in captured.graph_module.graph.nodes if node.op == "call_function"]


def test_every_tensor_is_an_input_by_name():
    captured = captured_training(SmallNet(), images(1)[0], optim.AdamW)
    parameters = [
        "frozen", "unreached",
        "conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert names(captured, Role.PARAMETER) == parameters
    assert names(captured, Role.BUFFER) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    trained = parameters[2:]
    assert names(captured, Role.STATE) == [
        f"{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    assert {"group0.lr", "group0.betas.0", "group0.betas.1", "group0.weight_decay"} <= set(
        names(captured, Role.SCALAR)
    )
    assert len(names(captured, Role.EXAMPLE)) == 2
    assert len(captured.graph_module.graph.find_nodes(op="placeholder")) == len(captured.inputs)


def test_tied_parameters_are_one_input():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    captured = captured_training(model, vectors(1)[0])
    assert names(captured, Role.PARAMETER) == ["0.weight", "0.bias", "2.bias"]
    assert [len(places) for places in captured.slots] == [2, 1, 1]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.AdamW])
def test_foreach_and_fused_are_captured_one_parameter_at_a_time(make, options):
    captured = captured_training(mlp(), vectors(1)[0], lambda parameters: make(parameters, **options))
    assert not [target for target in targets(captured) if "foreach" in target or "fused" in target]


def test_nothing_is_written_but_the_callers_own_tensors():
    captured = captured_training(SmallNet(), images(1)[0], optim.AdamW)
    for node in captured.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            assert node.target is torch.ops.aten.copy_.default
            assert node.args[0].op == "placeholder"


def test_hyper_parameters_are_not_baked_in():
    optimizer = optim.SGD(mlp().parameters(), lr=0.123)
    model = mlp()
    captured = captured_training(
        model, vectors(1)[0], lambda parameters: optim.SGD(parameters, lr=0.123, momentum=0.456)
    )
    assert "0.123" not in captured.graph_module.code
    assert "0.456" not in captured.graph_module.code
    assert optimizer.defaults["lr"] == 0.123


def test_inference_has_no_backward_and_no_updates():
    captured = capture(StepRequest(SmallNet().eval(), images(1)[0][:1], Mode.INFERENCE))
    assert not [target for target in targets(captured) if "backward" in target or "copy_" in target]
    assert captured.optimizer is None


def test_dropout_draws_in_training_only():
    training = captured_training(SmallNet(), images(1)[0])
    inference = capture(StepRequest(SmallNet().eval(), images(1)[0][:1], Mode.INFERENCE))
    assert any("bernoulli" in target or "dropout" in target for target in targets(training))
    assert not any("bernoulli" in target or "dropout" in target for target in targets(inference))


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear", "nearest"])
def test_operators_are_those_that_eager_runs(mode):
    """torch registers Python decompositions that tracing would take and that round otherwise."""
    dimensions = {"linear": 1, "trilinear": 3}.get(mode, 2)
    x = torch.randn(1, 2, *(4,) * dimensions)

    class Larger(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=2.0, mode=mode)

    captured = capture(StepRequest(Larger().eval(), (x,), Mode.INFERENCE))
    assert [target for target in targets(captured) if "upsample" in target]
    assert len(targets(captured)) <= 4


def test_models_on_the_meta_device_need_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 3))
        example = torch.randn(1 << 20, 1 << 20), torch.zeros(1 << 20, dtype=torch.long)
        captured = captured_training(model, example, optim.AdamW)
    assert captured.device == torch.device("cpu")
    assert not model[0].weight.grad
