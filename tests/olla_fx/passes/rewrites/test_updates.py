"""Updates in blocks of rows, and of looked-up rows alone: what, where, and the same bits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from olla_fx import operators
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted, blocked_updates
from olla_fx.passes.rewrites.probes import Probe
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, MOMENTUM, captured_training, sgd, vectors

aten = torch.ops.aten
DECAYING = {
    "sgd": sgd,
    "momentum": MOMENTUM,
    "decay": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "maximize": lambda parameters: optim.SGD(parameters, lr=0.1, maximize=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": ADAMW,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocked_updates, "LEAST_BLOCK_BYTES", 1024)


def equal(*_):
    return True


def wide():
    return nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 3))


class Language(nn.Module):
    """Looks tokens up, and predicts them."""

    def __init__(self, padding=None, tied=False, **options):
        super().__init__()
        self.table = nn.Embedding(500, 16, padding_idx=padding, **options)
        self.head = nn.Linear(16, 500, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens))).flatten(0, 1)


def sentences(count=3):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(6, (3, 8), generator=generator), torch.randint(500, (24,), generator=generator))
        for _ in range(count)
    ]


def changed(step):
    return {change.rewrite for change in step.plan.changes}


@pytest.mark.parametrize("optimizer", DECAYING)
def test_linear_layers(optimizer):
    batches = vectors(3, batch=1)
    pair = WholeStep(wide(), DECAYING[optimizer], batches[0]).run(batches)
    assert "blocked_updates" in changed(pair.step)
    plain = WholeStep(wide(), DECAYING[optimizer], batches[0], rewrites="none").step.plan
    assert pair.step.plan.peak_bytes < 0.5 * plain.peak_bytes


@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("optimizer", DECAYING)
def test_embeddings(optimizer, padding):
    batches = sentences()
    pair = WholeStep(Language(padding), DECAYING[optimizer], batches[0]).run(batches)
    assert ("row_updates" in changed(pair.step)) == (optimizer == "sgd")


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"tied": True}])
def test_embeddings_that_are_something_else(options):
    batches = sentences()
    pair = WholeStep(Language(**options), sgd, batches[0]).run(batches)
    assert "row_updates" not in changed(pair.step)


def test_a_late_learning_rate_and_a_scheduler():
    batches = sentences(4)
    scheduler = lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0, -1, 2)[step % 4])  # noqa: E731
    WholeStep(Language(0), sgd, batches[0], scheduler=scheduler).run(batches)


def test_gradients_that_are_wanted_stay_whole():
    batches = vectors(2, batch=1)
    own = OwnLoop(wide(), batches[0][:1], loss_fn=F.cross_entropy).run(batches)
    assert not changed(own.step) & {"blocked_updates", "row_updates"}
    clipped = WholeStep(wide(), sgd, batches[0], clip_grad_norm=0.1)
    assert "blocked_updates" not in changed(clipped.step)


def cuts_of(answer):
    captured = captured_training(wide(), vectors(1)[0])
    graph = run_passes(captured).graph_module.graph
    gradients = blocked_updates.gradients_of_updates(graph)
    assert len(gradients) == 2
    probe = Probe(torch.device("cpu"), True, lambda question, ask: answer)
    wanted = Wanted(["blocked_updates"], probe, dict.fromkeys(gradients, 4096))
    return run_passes(captured, wanted).changes


def test_products_that_differ_in_blocks_stay_whole():
    assert len(cuts_of(True)) == 2
    assert cuts_of(False) == ()


def test_a_gradient_of_a_sum():
    """Its factor is one number, expanded."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2000, bias=False))
    batches = vectors(3, batch=1)
    pair = WholeStep(model, sgd, batches[0], lambda outputs, _: outputs.sum()).run(batches)
    assert "blocked_updates" in changed(pair.step)


def test_a_probe_compares_bits():
    asked = []

    def remember(question, answer):
        asked.append(question)
        return answer()

    probe = Probe(torch.device("cpu"), True, remember)
    left, right = torch.empty(64, 1), torch.empty(1, 32)
    state = torch.get_rng_state()
    assert probe.equal_in_blocks(left, right, 16)
    assert torch.equal(state, torch.get_rng_state())
    assert asked[0]["product in blocks"] == 16
    unasked = Probe(torch.device("cpu"), False, remember)
    assert unasked.equal_in_blocks(left, right, 16)
    assert len(asked) == 1


ALPHAS = st.sampled_from([-0.1, -1e-30, -0.0, 0.0, 0.1, float("-inf")])


class Crossed(torch.autograd.Function):
    """Adds a part of another parameter to a gradient."""

    @staticmethod
    def forward(context, weight, other):
        context.save_for_backward(other)
        return weight.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient + 0.1 * context.saved_tensors[0], None


class Crossing(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 600, bias=False)
        self.weight = nn.Linear(6, 600, bias=False)

    def forward(self, x):
        return x @ Crossed.apply(self.weight.weight, self.other.weight).T + self.other(x)


def test_a_gradient_with_a_part_of_a_parameter_that_is_updated_first():
    captured = captured_training(Crossing(), vectors(1)[0])
    gradients = blocked_updates.gradients_of_updates(run_passes(captured).graph_module.graph)
    assert len(gradients) == 1
    batches = vectors(3)
    WholeStep(Crossing(), sgd, batches[0]).run(batches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_in_16_bits_stay_whole_on_the_cpu(dtype):
    """Their kernels round otherwise at the end of a row."""
    batches = [(x.to(dtype), y) for x, y in vectors(3, batch=1, width=37)]
    layers = nn.Linear(37, 203), nn.Tanh(), nn.Linear(203, 3)
    pair = WholeStep(nn.Sequential(*layers).to(dtype), sgd, batches[0]).run(batches)
    assert not changed(pair.step)
    texts = sentences()
    pair = WholeStep(Language().to(dtype), sgd, texts[0]).run(texts)
    assert not changed(pair.step) & {"row_updates", "blocked_updates"}


def test_short_integers_as_tokens():
    batches = [(tokens.int(), targets) for tokens, targets in sentences()]
    pair = WholeStep(Language(0), sgd, batches[0]).run(batches)
    assert "row_updates" in changed(pair.step)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 40), st.booleans(), ALPHAS)
def test_operators_of_embeddings(seed, rows, tokens, pads, alpha):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(rows, (2, tokens), generator=generator)
    padding = int(indices[0, 0]) if pads else -1
    values = torch.tensor([0.0, -0.0, 1.5, -2.25, 1e-20])
    gradient = torch.randn(2, tokens, 3, generator=generator)
    gradient[:, ::3] = values[torch.randint(5, gradient[:, ::3].shape, generator=generator)]
    table = values[torch.randint(5, (rows, 3), generator=generator)]
    whole = aten.embedding_dense_backward(gradient, indices, rows, padding, False)
    eager = table.clone().add_(whole, alpha=alpha)
    updated = operators.embedding_update_(table.clone(), gradient, indices, padding, alpha)
    assert torch.equal(eager.view(torch.int32), updated.view(torch.int32))
    half = rows // 2
    parts = [(0, half), (half, rows)]
    blocks = [operators.embedding_rows_backward(gradient, indices, *part, padding) for part in parts]
    assert torch.equal(whole.view(torch.int32), torch.cat(blocks).view(torch.int32))


class LowRank(nn.Module):
    """A weight that is a product: the gradient of one factor needs the other, which is updated first."""

    def __init__(self):
        super().__init__()
        self.right = nn.Parameter(torch.randn(4, 3) / 4)
        self.left = nn.Parameter(torch.randn(600, 4) / 4)

    def forward(self, x):
        return x.repeat(1, 100) @ (self.left @ self.right)


def test_a_factor_that_is_updated_first():
    captured = captured_training(LowRank(), vectors(1)[0])
    assert blocked_updates.gradients_of_updates(run_passes(captured).graph_module.graph) == {}
    batches = vectors(3)
    WholeStep(LowRank(), sgd, batches[0]).run(batches)
