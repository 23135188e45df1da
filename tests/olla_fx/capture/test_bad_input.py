"""What cannot be captured gives one clear exception, and leaves model and optimizer untouched."""

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import olla_fx
from olla_fx import CaptureError, OllaError, StepModeError, UnsupportedOptimizerError
from olla_solvers.errors import OptionError, SolverUnavailableError
from tests.olla_fx.helpers import SmallNet, Twins, assert_same, mlp, sgd, vectors

ROOT = Path(__file__).parents[3]


class Changed(nn.Module):
    """A small model with one bad habit."""

    def __init__(self, habit, **parts):
        super().__init__()
        self.body = mlp()
        self.habit = habit
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.habit(self, x)


def refused(model, said, kind=CaptureError, *, example=None, make=sgd, loss_fn=F.cross_entropy, **options):
    """Plan, expect a refusal, and see that nothing changed."""
    optimizer = make(model.parameters()) if make else None
    example = vectors(1)[0] if example is None else example
    values = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()) if optimizer else None
    random = torch.get_rng_state()
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(kind, match=said) as caught:
            function(model, example, loss_fn=loss_fn, optimizer=optimizer, **options)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, OllaError)
    assert_same(values, model.state_dict(), "model")
    assert optimizer is None or state == optimizer.state_dict()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert attributes == {name: dict(module.__dict__) for name, module in model.named_modules()}


# Models


@pytest.mark.parametrize(
    "habit",
    [
        lambda self, x: self.body(x) if x.sum() > 0 else self.body(-x),
        lambda self, x: self.body(x[x > 0][:24].view(4, 6)),
        lambda self, x: self.body(x) + sum(1 for value in x.flatten() if value > 0),
        lambda self, x: self.body(x) + torch.unique(x).sum(),
        lambda self, x: self.body(x) * torch.zeros(int(x.abs().sum())).numel(),
    ],
    ids=["branch", "mask", "loop", "unique", "shape"],
)
@pytest.mark.filterwarnings("ignore")
def test_data_dependent_control_flow(habit):
    refused(Changed(habit), r"depends? on the values of .*tensors.*torch\.where")


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            (torch.ones(4, 5), torch.zeros(4, dtype=torch.long)),
            "Sequential .* rejects the example input: RuntimeError",
        ),
        ((torch.ones(4, 6), torch.zeros(5, dtype=torch.long)), "rejects the example input"),
        ((torch.ones(4, 6), torch.ones(4, 6), torch.zeros(4)), "rejects the example input: TypeError"),
    ],
    ids=["width", "batch", "too many"],
)
def test_an_example_that_the_model_rejects(example, said):
    refused(mlp(), said, example=example)


@pytest.mark.parametrize("dtype", [torch.float64, torch.long])
def test_an_example_of_another_element_type(dtype):
    refused(mlp(), "rejects the example input", example=(vectors(1)[0][0].to(dtype), vectors(1)[0][1]))


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (nn.LayerNorm(6), (torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long))),
        (nn.GroupNorm(2, 6), (torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long))),
        (mlp(), (torch.ones(4, 6), torch.zeros(4, dtype=torch.int32))),
    ],
    ids=["layer norm", "group norm", "target"],
)
def test_element_types_that_only_kernels_refuse(model, example):
    refused(model, "rejects the example input", example=example)


def test_an_example_that_requires_a_gradient():
    refused(
        mlp(), "input 0 requires a gradient", example=(torch.ones(4, 6, requires_grad=True), vectors(1)[0][1])
    )


def test_an_inference_example_that_the_model_rejects():
    with pytest.raises(CaptureError, match="rejects the example input"):
        olla_fx.optimize(mlp().eval(), torch.ones(4, 5))


def count_calls(self, x):
    self.calls += 1
    return self.body(x)


def keep_hidden(self, x):
    self.hidden = self.body(x)
    return self.hidden


def grow_history(self, x):
    self.history.append(1)
    return self.body(x)


def count_in_dict(self, x):
    self.counts["calls"] += 1
    return self.body(x) * self.counts["calls"]


def count_in_object(self, x):
    self.counter.calls += 1
    return self.body(x) * self.counter.calls


def swap_in_list(self, x):
    self.history[0] = x.mean()
    return self.body(x)


class Counter:
    calls = 0


@pytest.mark.parametrize(
    ("habit", "part", "value"),
    [
        (count_calls, "calls", 0),
        (keep_hidden, "hidden", None),
        (grow_history, "history", []),
        (count_in_dict, "counts", {"calls": 0}),
        (count_in_object, "counter", Counter()),
        (swap_in_list, "history", [0]),
    ],
)
def test_side_effects(habit, part, value):
    refused(Changed(habit, **{part: value}), f"changes its attribute '{part}.*registered buffer")


def test_a_tensor_in_a_container_that_is_written_to():
    def habit(self, x):
        self.kept[0].add_(1)
        return self.body(x) * self.kept[0]

    refused(Changed(habit, kept=[torch.zeros(3)]), "kept|container|buffer")


def test_a_parameter_that_hides_in_a_list_is_trained_or_refused():
    model = Changed(lambda self, x: F.linear(self.body(x), self.weights[0]), own=nn.Linear(3, 3, bias=False))
    model.weights = [model.own.weight]
    refused(model, r"own\.weight")


def branching(self, x):
    if x.sum() > 0:
        return self.body(x)
    return self.body(-x)


class Causal(nn.Module):
    """Hands its encoder a mask that is a buffer, as tutorials do."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))
        self.options = options

    def forward(self, x):
        return self.encoder(x, mask=self.mask, **self.options).mean(1)


def test_a_mask_that_a_transformer_looks_into():
    batches = [(torch.randn(2, 5, 8), torch.randint(8, (2,))) for _ in range(3)]
    with pytest.raises(CaptureError, match=r"pass is_causal .* as True or False"):
        Twins(Causal(), sgd, batches[0])
    Twins(Causal(is_causal=True), sgd, batches[0]).run(batches)


def test_the_line_that_depends_on_data_is_named():
    refused(Changed(branching), r"capture/test_bad_input\.py, line \d+: if x\.sum\(\) > 0:")
    refused(Changed(lambda self, x: self.body(x[:, :5])), r"capture/test_bad_input\.py, line \d+")


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook",
                                      "register_full_backward_hook"])  # fmt: skip
def test_module_hooks(register):
    model = mlp()
    getattr(model[0], register)(lambda *_: None)
    refused_with_hooks(model, "module '0' has the hook")


def test_torchscript():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4)))
    refused_with_hooks(model, "module '1' was compiled by TorchScript")


def test_an_operator_that_fx_cannot_write():
    refused(Changed(lambda self, x: self.body(x + torch.empty_like(x).random_(0, 5))), "use torch.randint")


def test_gradient_hooks():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient)
    refused_with_hooks(model, "parameter '0.weight' has gradient hooks")
    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    refused_with_hooks(model, "parameter '0.weight' has gradient hooks")


def refused_with_hooks(model, said):
    with pytest.raises(CaptureError, match=said):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))


def test_reentrant_checkpointing():
    model = Changed(lambda self, x: checkpoint(self.body, x, use_reentrant=True), head=nn.Linear(3, 3))
    model.habit = lambda self, x: self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=True))
    refused(model, r"loses the gradient of body\.0\.bias .*use_reentrant=False")


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(CaptureError, match="not initialised yet"):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))


def test_two_parameters_in_one_storage():
    storage = torch.randn(2, 6, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight, model[1].weight = nn.Parameter(storage[0]), nn.Parameter(storage[1])
    refused(model, r"0\.weight and 1\.weight are different tensors in one storage")


def test_recurrent_weights_as_cudnn_lays_them():
    model = nn.LSTM(3, 4)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(weights, model.parameters())
    with pytest.raises(CaptureError, match=r"in one storage.*cudnn\.flags\(enabled=False\)"):
        olla_fx.optimize(model.eval(), torch.zeros(2, 5, 3))


def test_operators_that_raise_on_bad_data():
    model = Changed(lambda self, x: self.body(x) + torch.linalg.inv(self.square).sum())
    model.square = nn.Parameter(torch.eye(3))
    refused(model, "_linalg_check_errors.*inv_ex")


def test_tensors_that_are_given_another_size():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.CrossMapLRN2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    refused(model, r"resize_.*LocalResponseNorm", example=(torch.ones(2, 3, 4, 4), torch.tensor([0, 1])))


@pytest.mark.parametrize("make", [sgd, optim.AdamW])
def test_complex_parameters(make):
    model = Changed(lambda self, x: (self.body(x) * self.phase).abs())
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    refused(model, "complex", make=make)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(6, 6, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    refused(model, ".", example=(torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)))


def test_an_answer_that_is_no_structure_of_tensors():
    model = Changed(lambda self, x: Counter())
    with pytest.raises(CaptureError, match="returns a Counter"):
        olla_fx.optimize(model.eval(), torch.ones(4, 6))


# Losses


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (partial(F.cross_entropy, reduction="none"), r"scalar tensor, not \[4\]"),
        (lambda answer, target: 3.0, "scalar tensor, not float"),
        (lambda answer, target: target.sum().float(), "depends on no parameter"),
        (lambda answer, target: answer.detach().sum(), "depends on no parameter"),
        (lambda answer: answer.sum(), "TypeError"),
        (lambda answer, target: answer.sum() if answer.sum() > 0 else -answer.sum(), "depend on the values"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_losses(loss_fn, said):
    refused(mlp(), said, loss_fn=loss_fn)


class CountingLoss(nn.Module):
    calls = 0

    def forward(self, answer, target):
        self.calls += 1
        return F.cross_entropy(answer, target) * self.calls


class RememberingLoss:
    def __init__(self):
        self.calls = []

    def __call__(self, answer, target):
        self.calls.append(1)
        return F.cross_entropy(answer, target)


@pytest.mark.parametrize(("make_loss", "said"), [(CountingLoss, "calls"), (RememberingLoss, "itself")])
def test_losses_with_side_effects(make_loss, said):
    loss_fn = make_loss()
    refused(mlp(), said, loss_fn=loss_fn)
    assert not loss_fn.calls


# Optimizers


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (optim.LBFGS, "LBFGS .*closure.*Use one of SGD, Adam"),
        (optim.RAdam, "RAdam .*step number"),
        (optim.ASGD, "ASGD .*step number"),
        (lambda parameters: optim.SparseAdam(list(parameters)), "SparseAdam .*sparse"),
        (lambda parameters: optim.SGD(parameters, lr=torch.tensor(0.1)), "lr is a tensor.*number"),
        (partial(optim.Adam, differentiable=True), "differentiable=True"),
    ],
    ids=["LBFGS", "RAdam", "ASGD", "SparseAdam", "tensor", "differentiable"],
)
def test_optimizers(make, said):
    refused(mlp(), said, UnsupportedOptimizerError, make=make)


def test_an_optimizer_of_ones_own():
    class Own(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    refused(mlp(), "Own is not an optimizer that can be captured", UnsupportedOptimizerError,
            make=lambda parameters: Own(parameters, lr=0.1))  # fmt: skip


def test_an_optimizer_over_other_parameters():
    other = mlp()
    refused(mlp(), r"shape \[8, 6\] that is no parameter of the model", UnsupportedOptimizerError,
            make=lambda _: sgd(other.parameters()))  # fmt: skip


# Arguments


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
        with pytest.raises(CaptureError, match="unknown mode 'train'"):
            function(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, mode="train")
        with pytest.raises(CaptureError, match=r"call it first"):
            function(model, x, mode="inference")
        with pytest.raises(CaptureError, match=r"eval mode.*model\.train\(\)"):
            function(model.eval(), (x, y), loss_fn=F.cross_entropy, optimizer=optimizer)
        with pytest.raises(CaptureError, match=r"call it first"):
            function(model, (x, y), mode="training")
        model.train()


def test_an_unknown_solver_is_refused_before_anything_runs():
    refused(mlp(), "cplex", SolverUnavailableError, solver="cplex")


def test_a_training_call_in_eval_mode():
    model = SmallNet()
    example = (torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    optimizer = sgd(model.parameters())
    step = olla_fx.optimize(model, example, loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with pytest.raises(StepModeError, match=r"model\.train\(\)"):
        step(*example)
    assert_same(before, model.state_dict(), "model")


WITHOUT_COMPILER = """
import copy, warnings
import torch
import torch.nn.functional as F
import olla_fx
from tests.olla_fx.helpers import assert_same, assert_same_models, assert_same_optimizers, mlp, vectors

torch.manual_seed(0)
one = mlp()
other = copy.deepcopy(one)
optimizers = [torch.optim.AdamW(each.parameters()) for each in (one, other)]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    step = olla_fx.optimize(
        other, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizers[1], solver="none"
    )
    for x, y in vectors(4):
        optimizers[0].zero_grad()
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        optimizers[0].step()
        step.poison()
        assert_same(loss.detach(), step(x, y), "loss")
    second = olla_fx.optimize(other.eval(), x, solver="none")
    second(x)
assert_same_models(one, other)
assert_same_optimizers(*optimizers)
assert step.binding == "stock" and second.binding == "stock", step.binding
assert step.counts.served == 0
assert "stock" in str(step.report())
print(len([each for each in said if "allocator" in str(each.message)]))
"""


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [({"OLLA_FX_DISABLE_ARENA": "1"}, 0), ({"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": "empty"}, 1)],
    ids=["disabled", "no compiler"],
)
def test_without_a_compiler_the_stock_allocator_serves(variables, warnings, tmp_path):
    if "TORCH_EXTENSIONS_DIR" in variables:
        variables = {**variables, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "solvers")])},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(warnings)


# Options


@pytest.mark.parametrize("time_limit", [-1, float("nan"), "3", True])
def test_time_limits(time_limit):
    refused(mlp(), "at least 0, or None; not", OptionError, time_limit=time_limit)


def test_an_unknown_solver_is_refused_before_capturing():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(SolverUnavailableError, match="unknown solver 'scip'; one of auto, cbc"):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=None, solver="scip")


def test_averages_over_all_batches():
    refused(nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)), "0 has momentum=None")


def test_a_rejected_example_logs_no_traceback(caplog):
    refused(mlp(), "rejects the example input", example=(torch.ones(4, 5), vectors(1)[0][1]))
    assert not [each for each in caplog.records if each.levelno >= 30]
