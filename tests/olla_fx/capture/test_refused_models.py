"""Models and examples that cannot be captured are refused with one clear line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.capture.refusals import Changed, Counter, refused
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


class Asserting(nn.Module):
    def forward(self, x):
        assert x.shape[1] == 5, "five columns"
        return x


def test_an_example_that_fails_an_assertion_is_explained():
    with pytest.raises(CaptureError, match=r"rejects the example input.*five columns.*in eager"):
        olla_fx.optimize(Asserting().eval(), (torch.ones(2, 3),), solver="none", fallback="raise")


@pytest.mark.parametrize(
    "habit",
    [
        lambda self, x: self.body(x) if self.body(x).sum() > 0 else self.body(-x),
        lambda self, x: self.body(x)[self.body(x) > 0],
        lambda self, x: self.body(x) + sum(1 for value in self.body(x).flatten() if value > 0),
        lambda self, x: self.body(x) + torch.unique(x).sum(),
        lambda self, x: self.body(x) * torch.zeros(int(self.body(x).abs().sum())).numel(),
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
        olla_fx.optimize(mlp().eval(), torch.ones(4, 5), fallback="raise")


def branching(self, x):
    y = self.body(x)
    if y.sum() > 0:
        return y
    return -y


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
        WholeStep(Causal(), sgd, batches[0])
    WholeStep(Causal(is_causal=True), sgd, batches[0]).run(batches)


def test_the_line_that_depends_on_data_is_named():
    refused(Changed(branching), r"capture/test_refused_models\.py, line \d+: if y\.sum\(\) > 0:")
    refused(Changed(lambda self, x: self.body(x[:, :5])), r"capture/test_refused_models\.py, line \d+")


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
        olla_fx.optimize(
            model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), fallback="raise"
        )


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(CaptureError, match="not initialised yet"):
        olla_fx.optimize(
            model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), fallback="raise"
        )


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
        olla_fx.optimize(model.eval(), torch.zeros(2, 5, 3), fallback="raise")


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
        olla_fx.optimize(model.eval(), torch.ones(4, 6), fallback="raise")


def test_averages_over_all_batches():
    refused(nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)), "0 has momentum=None")


def test_a_rejected_example_logs_no_traceback(caplog):
    refused(mlp(), "rejects the example input", example=(torch.ones(4, 5), vectors(1)[0][1]))
    assert not [record for record in caplog.records if record.levelno >= 30]
