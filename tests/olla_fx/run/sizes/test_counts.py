"""Numbers that inputs answer to Python's questions become symbols when they take a second value."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, mlp
from tests.olla_fx.run.sizes.models import WORDS

IGNORED = -100


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def plans_made(caplog) -> int:
    """Return how often a step was captured."""
    # Not "planning, ...", which tells of a planning that takes longer than two seconds.
    return 1 + sum(message.startswith(("planning again", "planning for")) for message in caplog.messages)


def rows(*counts: int, batch: int = 16):
    """Batches of rows of which so many have a label, at random places."""
    for count in counts:
        target = torch.full((batch,), IGNORED)
        target[torch.randperm(batch)[:count]] = torch.randint(3, (count,))
        yield torch.randn(batch, 6), target


def labelled(outputs, target):
    """The cross entropy of the rows that have a label."""
    chosen = target != IGNORED
    return F.cross_entropy(outputs[chosen], target[chosen])


COUNTS = (9, 12, 5, 7, 16, 3, 12, 8, 6, 2)


def test_a_loss_of_chosen_rows_is_captured_once_more(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = list(rows(*COUNTS))
    step = WholeStep(mlp(), ADAMW, batches[0], labelled).run(batches).step
    assert step.stats.families == 1
    assert plans_made(caplog) == 2
    assert_served(step)


class Chosen(nn.Module):
    """Returns the results of the rows that have a label, which are as many as these."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels):
        return self.body(x)[labels != IGNORED] * 2


def chosen_loss(outputs, target):
    return F.cross_entropy(outputs, target[target != IGNORED])


def test_outputs_that_are_as_long_as_a_count(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = [(x, target, target) for x, target in rows(*COUNTS)]
    loop = OwnLoop(Chosen(), batches[0][:2], ADAMW, chosen_loss).run(batches)
    assert loop.step.stats.families == 1
    assert plans_made(caplog) == 2
    loop.assert_served()
    check_inference(Chosen(), [batch[:2] for batch in batches], None)


def test_no_rows_and_one_have_plans_of_their_own():
    batches = list(rows(9, 12, 1, 5, 0, 1, 0, 7))
    loop = OwnLoop(Chosen(), batches[0], ADAMW, lambda outputs, _: outputs.sum())
    loop.run([(*batch, batch[1]) for batch in batches])
    assert loop.step.stats.families == 1


class Trimmed(nn.Module):
    """Leaves out the padding that no text of a batch needs."""

    def __init__(self, longest=lambda lengths: int(lengths.max())) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 5)
        self._longest = longest

    def forward(self, x, lengths):
        longest = self._longest(lengths)
        hidden = self.words(x[:, :longest]) + torch.zeros(len(x), longest, 8)
        is_there = torch.arange(longest)[None] < lengths[:, None]
        if is_there[:, : longest - 1].all():
            hidden = hidden * 2
        return self.head((hidden * is_there[..., None]).sum(1) / longest)


def texts(*longest: int, padded: int = 24):
    """Batches of texts, padded to more than the longest one, and their lengths."""
    for length in longest:
        lengths = torch.randint(2, max(length, 3), (4,))
        lengths[0], lengths[2] = 2, length
        yield torch.randint(WORDS, (4, padded)), lengths, torch.randint(5, (4,))


def item(lengths):
    return lengths.max().item()


def integer(lengths):
    return int(lengths.max())


LONGEST = (9, 12, 5, 7, 20, 22, 12, 8, 6)


@pytest.mark.parametrize("longest", [item, integer])
def test_a_length_that_an_input_tells(longest, caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = list(texts(*LONGEST))
    step = WholeStep(Trimmed(longest), ADAMW, batches[0]).run(batches).step
    assert step.stats.families == 1
    assert plans_made(caplog) == 2
    loop = OwnLoop(Trimmed(longest), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 1
    loop.assert_served()
    assert "int" not in globals()


def test_the_length_of_all_that_is_there(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = list(texts(9, 12, 24, 5, 24, 7))
    loop = OwnLoop(Trimmed(), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 1
    assert plans_made(caplog) == 3


def test_a_length_beside_sizes(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = [next(texts(length, padded=length + index % 4)) for index, length in enumerate(LONGEST)]
    step = WholeStep(Trimmed(), ADAMW, batches[0]).run(batches).step
    assert step.stats.families <= 2
    assert plans_made(caplog) <= 3


def test_answers_beside_a_length_are_guarded():
    batches = list(texts(*LONGEST))
    for index in (2, 3, 5, 6, 7, 8):
        batches[index][1].fill_(LONGEST[index])
    loop = OwnLoop(Trimmed(), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 2
    loop.assert_served()


def test_decisions_by_a_count_are_guarded():
    class Deciding(Trimmed):
        def forward(self, x, lengths):
            longest = int(lengths.max())
            return super().forward(x, lengths) * (2 if longest > 10 else 3)

    batches = list(texts(*LONGEST))
    loop = OwnLoop(Deciding(), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 2


def test_a_loop_over_a_count_is_captured_for_each(caplog):
    class Unrolled(Trimmed):
        def forward(self, x, lengths):
            hidden = self.words(x)
            return self.head(sum(hidden[:, index] for index in range(int(lengths.max()))))

    caplog.set_level(logging.INFO, "olla_fx")
    batches = list(texts(5, 3, 5, 4, 3))
    step = WholeStep(Unrolled(), ADAMW, batches[0]).run(batches).step
    assert step.stats.families == 0
    assert step.stats.cached_plans == 3
    assert sum("stays a number" in message for message in caplog.messages) == 1


def test_a_loop_whose_lengths_never_come_twice_is_planned():
    batches = list(texts(*range(4, 24)))
    loop = OwnLoop(Trimmed(), batches[0][:2], ADAMW, fallback="eager").run(batches)
    assert loop.step.stats.eager_runs == 1


class Experts(nn.Module):
    """Sends each row to the expert that an input names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x, expert):
        result = x.new_zeros(len(x), 3)
        for index, module in enumerate(self.experts):
            (chosen,) = torch.where(expert == index)
            result = result.index_add(0, chosen, module(x[chosen]))
        return result


def routed(steps: int):
    return [(torch.randn(40, 6), torch.randint(3, (40,)), torch.randint(3, (40,))) for _ in range(steps)]


def test_several_counts(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    batches = routed(9)
    loop = OwnLoop(Experts(), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 1
    assert plans_made(caplog) == 2
    loop.assert_served()
    step = WholeStep(Experts(), ADAMW, batches[0]).run(batches).step
    assert step.stats.families == 1
    assert_served(step)


class Contrasting(nn.Module):
    """Similarities of each row to the two others of its class, as many as there are of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels):
        features = F.normalize(self.body(x), dim=1)
        others = ~torch.eye(len(x), dtype=torch.bool)
        same = (labels[:, None] == labels[None])[others].view(len(x), -1)
        similar = (features @ features.T)[others].view(len(x), -1)
        positives = similar[same].view(len(x), -1)
        negatives = similar[~same].view(len(x), -1)
        return torch.cat([positives.mean(1, keepdim=True), negatives], 1)


def test_counts_of_pairs_that_make_a_matrix(caplog):
    caplog.set_level(logging.INFO, "olla_fx")
    labels = [torch.arange(12) // of_class for of_class in (3, 4, 6, 3, 4)]
    batches = [(torch.randn(12, 6), label, torch.zeros(12, dtype=torch.long)) for label in labels]
    loop = OwnLoop(Contrasting(), batches[0][:2], ADAMW).run(batches)
    assert loop.step.stats.families == 1
    assert plans_made(caplog) == 2


def test_dynamic_false_has_a_plan_for_each_count():
    batches = list(rows(9, 12, 5))
    step = WholeStep(mlp(), ADAMW, batches[0], labelled, dynamic=False).run(batches).step
    assert (step.stats.families, step.stats.cached_plans) == (0, 3)
