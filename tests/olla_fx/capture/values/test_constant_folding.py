"""Python may ask for values that depend on no input, and gets eager's answer; for others it is refused."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn, optim

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.errors import CaptureError
from olla_fx.models.vision import import_torchvision
from tests.olla_fx.comparisons import same_bits
from tests.olla_fx.harness import WholeStep, check_inference

ADAMW = partial(optim.AdamW, lr=1e-3)


class Asking(nn.Module):
    """Multiplies by what ``ask`` gives, a Python number."""

    def __init__(self, ask: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(1) * self.ask(x)


def packed(x):
    """As transformers looks for packed sequences."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return 2.0 if ((steps != 1).cumsum(-1)[:, -1] == 0).all() else 3.0


def written(x):
    ones = torch.ones(4)
    half = ones[:2]
    half.mul_(3)
    return ones.sum().item()


def written_after_a_long_way(x):
    ones = torch.ones(4)
    view = ones
    for _ in range(100):
        view = view.view(2, 2).view(4)
    view.add_(1)
    return ones.sum().item()


KNOWN = {
    "packed": packed,
    "like": lambda x: 2.0 if torch.ones_like(x).all() else 3.0,
    "new": lambda x: x.new_full((3,), 7).sum().item(),
    "several results": lambda x: torch.arange(6.0).view(2, 3).max(1)[1].sum().item(),
    "equal": lambda x: 2.0 if torch.equal(torch.eye(2), torch.ones(2).diag()) else 3.0,
    "float": lambda x: torch.linspace(0, 1, 7).sin().sum().item(),
}
UNKNOWN = {
    "random": lambda x: 2.0 if torch.rand(()) > 0.5 else 3.0,
    "random in place": lambda x: 2.0 if torch.zeros(3).uniform_().sum() > 1 else 3.0,
    "uninitialised": lambda x: 2.0 if torch.empty(3).sum() > 0 else 3.0,
    "uninitialised like": lambda x: 2.0 if torch.empty_like(x).sum() > 0 else 3.0,
    "too long": lambda x: 2.0 if sum(torch.ones(1) for _ in range(100)).bool() else 3.0,
}


@pytest.mark.parametrize("name", KNOWN)
def test_constant_folding(name):
    check_inference(Asking(KNOWN[name]), [(torch.randn(3, 4),) for _ in range(3)], 1)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unconstant_folding_are_refused(name):
    with pytest.raises(CaptureError, match=r"depend on the values|Asking"):
        capture(StepRequest(Asking(UNKNOWN[name]).eval(), (torch.randn(3, 4),), Mode.INFERENCE))


@pytest.mark.parametrize("ask", [written, written_after_a_long_way])
def test_constants_that_were_written_to_are_not_mistaken(ask):
    """Either the value after the write, or a refusal; never the value before it."""
    model, x = Asking(ask).eval(), torch.randn(3, 4)
    try:
        step = olla_fx.optimize(model, x, solver="none", fallback="raise")
    except CaptureError:
        return
    with torch.no_grad():
        assert same_bits(step(x), model(x))


def test_the_baseline_knows_them_too():
    plan = olla_fx.plan(Asking(packed).eval(), torch.randn(3, 4), solver="none")
    assert plan.baseline is not None


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    import_torchvision()
    options = {"vocab_size": 50, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, **options)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, **options
    )
    return transformers.LlamaForCausalLM(config)


class Labelled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, labels=labels).loss


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models_without_a_mask(name):
    tokens = torch.randint(50, (2, 6))
    batch = tokens, tokens, torch.zeros(())
    WholeStep(Labelled(language_model(name)), ADAMW, batch, lambda loss, _: loss).run([batch] * 3)
