"""Whole steps that raise leave model, optimizer and random numbers as eager's do: a bad batch is skipped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.comparisons import assert_same, random_states
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import ADAMW, MOMENTUM, SmallNet, images
from tests.olla_fx.run.whole_step.clipped import ClippedStep


def bad_labels(batches, *, row=-1):
    """Give every third batch a label that is no class."""
    for _, y in batches[::3]:
        y[row] = 99
    return batches


def skip_bad_batches(pair, batches):
    """Train in eager and planned, and skip batches on which a step raises; compare after each step."""
    raised = 0
    for batch in batches:
        states, errors = [], []
        for train in (pair.train_eager, lambda same_batch: pair.step(*same_batch)):
            torch.manual_seed(pair.calls)
            try:
                answer = train(batch)
            except (IndexError, RuntimeError) as error:
                errors.append((type(error), str(error)))
                answer = None
            states.append((answer, random_states()))
        pair.calls += 1
        assert_same(*states, f"answers and random numbers of step {pair.calls}")
        assert len(errors) in (0, 2)
        assert len(set(errors)) <= 1
        raised += bool(errors)
        pair.compare()
        pair.poison()
    assert 0 < raised < len(batches)
    assert pair.step.stats.binding == "buffer"
    assert pair.step.stats.counts.served > 0
    assert pair.step.stats.counts.outside == 0


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
def test_a_label_out_of_range(make):
    batches = bad_labels(images(9))
    pair = WholeStep(SmallNet(), make, images(1)[0])
    skip_bad_batches(pair, batches)


def test_a_bad_batch_after_good_ones():
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0])
    pair.run(images(3))
    skip_bad_batches(pair, bad_labels(images(6)))


@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_label_out_of_range_in_a_micro_batch(row):
    pair = ClippedStep(SmallNet(), ADAMW, images(1, batch=6)[0], parts=3, norm=0.05)
    skip_bad_batches(pair, bad_labels(images(7, batch=6), row=row))


class Reader(nn.Module):
    """Dropout and batch statistics before and after an embedding whose indices may be out of range."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.words = nn.Embedding(10, 4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("greatest", torch.zeros(()))

    def forward(self, x, words):
        self.seen.mul_(0.9).add_(x.mean(0))
        x = self.drop(self.before(x))
        self.greatest.copy_(x.detach().amax())
        x = self.after(x + self.words(words))
        return self.head(self.drop(x))


def words(count, bad):
    generator = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randn(6, 4, generator=generator),
            torch.randint(10, (6,), generator=generator),
            torch.randint(3, (6,), generator=generator),
        )
        for _ in range(count)
    ]
    for batch in batches[::3]:
        batch[bad][2] = 77
    return batches


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_effects_before_what_raises_happen_and_none_after(bad, parts):
    example = words(2, bad)[1]
    pair = ClippedStep(Reader(), ADAMW, example, parts=parts)
    skip_bad_batches(pair, words(9, bad))


def test_a_loss_that_its_backward_does_not_read():
    def loss_fn(outputs, target):
        entropy = F.binary_cross_entropy(target.mean().clamp(min=0), target.sum() * 0)
        return F.mse_loss(outputs, target) + entropy

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.randn(3, 4), torch.rand(3, 4)) for _ in range(6)]
    for _, y in batches[::3]:
        y += 5
    skip_bad_batches(WholeStep(model, ADAMW, batches[1], loss_fn), batches)


class Sharing(nn.Module):
    """Dropout and batch statistics before and after a division of whole numbers, which is read last."""

    def __init__(self, divide):
        super().__init__()
        self.divide = divide
        self.before, self.after = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x, counts):
        x = self.drop(self.before(x))
        shares = self.divide(torch.full_like(counts, 12), counts)
        return self.head(self.drop(self.after(x))) * shares[:, None]


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod])
def test_whole_numbers_divided_by_zero(divide):
    batches = words(6, bad=1)
    for index, (_, counts, _) in enumerate(batches):
        counts.clamp_(min=1)
        if index % 3 == 0:
            counts[2] = 0
    skip_bad_batches(ClippedStep(Sharing(divide), ADAMW, batches[1]), batches)


def test_the_state_of_the_first_step_is_undone():
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0])
    x, y = images(1)[0]
    with pytest.raises(IndexError):
        pair.step(x, y + 99)
    assert not pair.optimizers[1].state


def test_updates_do_not_wait_for_what_backward_reads_again():
    """The gradient of an embedding comes last; updates of the layers above are not held back for it."""
    layers = [nn.Linear(64, 64) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(10, 64), *layers)
    words = torch.randint(10, (2, 3))
    pair = WholeStep(model, MOMENTUM, (words, words), lambda outputs, _: outputs.square().mean())
    assert pair.step.plan.peak_bytes < 4 * 64 * 64 * 4
