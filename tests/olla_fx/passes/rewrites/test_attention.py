"""Rewrites of attention: what they change, what they leave, and the same bits."""

import pytest
import torch
from torch import nn

from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted
from olla_fx.passes.rewrites.probes import Probe
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, Written, captured_training

aten = torch.ops.aten


def texts(count=2, batch=4, length=6, width=32):
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(batch, length, width, generator=generator),
            torch.randint(5, (batch,), generator=generator),
        )
        for _ in range(count)
    ]


def means(self, x):
    return self.head(self.body(x).mean(1))


def encoder(dropout=0.1, width=32):
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Written(means, body=body, head=nn.Linear(width, 5))


def of_parts(self, x):
    parts = self.first(x).unflatten(-1, (3, -1)).movedim(-2, 0).contiguous()
    return self.head((parts[0].exp() * parts[self.second]).mean(1))


def copies(second, width=32):
    """A copy of three parts, of which backward reads one: the second factor is the exponential's result."""
    return Written(of_parts, first=nn.Linear(32, 3 * width), second=second, head=nn.Linear(width, 5))


def changed(model, batch, *names):
    captured = captured_training(model, batch)
    wanted = Wanted(names or ["separate_parts"], Probe(torch.device("cpu"), True, lambda _, answer: answer()))
    rewritten = run_passes(captured, wanted)
    rewritten.graph_module.graph.lint()
    return len(rewritten.changes)


def test_what_is_changed():
    assert changed(encoder(), texts(1)[0]) == 2
    assert changed(encoder(0.0), texts(1)[0]) == 0  # another kernel, whose backward reads all three


def test_which_masks_are_packed():
    batch = texts(1, batch=16)[0]
    # Of each layer three dropouts; of the fourth, that of attention's result, the gradient lies otherwise.
    assert changed(encoder(), batch, "packed_masks") == 6
    assert changed(encoder(), batch, "boolean_masks", "packed_masks") == 2 + 6 + 2
    # Attention's weights have 32 bits where all else has 16.
    assert changed(encoder().bfloat16(), (batch[0].bfloat16(), batch[1]), "packed_masks") == 2


@pytest.mark.parametrize("recompute", [0, 1.0])
@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
def test_bits_of_packed_masks(kind, recompute):
    batches = texts(3, batch=16)
    if kind is WholeStep:
        pair = WholeStep(encoder(), ADAMW, batches[0], recompute=recompute).run(batches)
    else:
        pair = OwnLoop(encoder(), batches[0][:1], recompute=recompute).run(batches)
        pair.assert_served()
    assert "packed_masks" in {change.rewrite for change in pair.step.plan.changes}


@pytest.mark.parametrize(("width", "expected"), [(32, 1), (3, 0)])
def test_parts_begin_at_aligned_addresses(width, expected):
    assert changed(copies(1, width), texts(1)[0]) == expected


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
@pytest.mark.parametrize("model", [encoder, lambda: copies(1), lambda: copies(0)], ids=["encoder", "1", "0"])
def test_bits(model, kind):
    batches = texts(3)
    if kind is WholeStep:
        WholeStep(model(), ADAMW, batches[0]).run(batches)
    else:
        OwnLoop(model(), batches[0][:1]).run(batches).assert_served()


def test_bits_in_16_bits():
    batches = [(x.bfloat16(), y) for x, y in texts(2, batch=16)]
    WholeStep(encoder().bfloat16(), ADAMW, batches[0]).run(batches)


def test_the_peak_falls():
    batch = texts(1, batch=16, length=24)[0]
    peaks = [
        WholeStep(encoder(), ADAMW, batch, rewrites=names).step.plan.peak_bytes for names in ("none", "all")
    ]
    assert peaks[1] < peaks[0]
