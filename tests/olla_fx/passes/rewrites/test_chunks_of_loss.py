"""What is computed chunk by chunk is what the whole gives, to the bit."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_fx.passes.rewrites import chunks_of_loss
from tests.olla_fx.passes.rewrites.languages import IGNORED

aten = torch.ops.aten


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(2, 70), st.integers(2, 200), st.integers(2, 9), st.integers(0, 2),
    st.sampled_from([IGNORED, 0, 1]),
)  # fmt: skip
def test_losses_and_log_probabilities(seed, rows, classes, count, reduction, ignored):
    """Losses, and gradients of logits in rows and in columns, for logits with infinities, too."""
    generator = torch.Generator().manual_seed(seed)
    # One element a product: its kernels have no choice.
    hidden = torch.randn(rows, 1, generator=generator)
    weight = torch.randn(1, classes, generator=generator) * 5
    weight[0, seed % classes] = (0.0, 1e30, -torch.inf)[seed % 3]
    target = torch.randint(classes, (rows,), generator=generator)
    target[0] = ignored
    above = torch.randn(rows, generator=generator) if reduction == 0 else torch.tensor(0.75)
    layer = chunks_of_loss.Layer(hidden, weight, None, target, above)
    sizes = chunks_of_loss.ChunkedLoss(
        rows, classes, 1, count, torch.float32, torch.float32, reduction, ignored,
        chunks_of_loss.Gradients(False, False, False),
    )  # fmt: skip
    whole = torch._log_softmax(hidden @ weight, 1, False)
    assert_equal(sizes.whole(run, layer)[0], sizes.forward(run, layer))
    gathered = chunks_of_loss._Gathered()
    columns = dataclasses.replace(sizes, wanted=chunks_of_loss.Gradients(False, True, False))
    for chunk in columns.row_chunks:
        columns._noted_log_softmax(run, layer, chunk, gathered)
    notes = [torch.cat(parts) for parts in (gathered.maxima, gathered.largest)]
    total = sizes.forward(run, layer).total
    spread = aten.nll_loss_backward(above, whole, target, None, reduction, ignored, total)
    gradient = torch._log_softmax_backward_data(spread, whole, 1, torch.float32)
    parts = [
        columns._gradient_of_columns(run, layer, chunk, notes, target == ignored, total)
        for chunk in columns.column_chunks
    ]
    assert_equal([gradient], [torch.cat(parts, 1)])


def run(target, *args, **kwargs):
    return target(*args, **kwargs)


def assert_equal(expected, given):
    for one, other in zip(expected, given, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
