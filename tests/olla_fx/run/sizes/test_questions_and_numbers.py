"""Sizes as symbols beside questions about inputs and numbers that are bound late, in one plan."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, Written
from tests.olla_fx.run.models.test_masked_transformers import make as make_transformer
from tests.olla_fx.run.sizes.models import WORDS, Encoder, Unrolled, texts, vectors, words

LENGTHS = (9, 12, 5, 7, 20, 3, 12, 8, 6)


class Masked(nn.Module):
    """Averages words, all of them or those that a mask shows, as Python finds by asking the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 5)

    def forward(self, x, mask):
        hidden = self.words(x)
        if mask.sum() == 4 * x.shape[1]:
            return self.head(hidden.mean(1))
        hidden = torch.where(mask[..., None], hidden, torch.zeros((), dtype=hidden.dtype))
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


def masked(length: int, hidden: int):
    """Texts of which the last words are hidden."""
    x, target = texts(4, length)
    mask = torch.ones(4, length, dtype=torch.bool)
    mask[-1, length - hidden :] = False
    return x, mask, target


def masked_batches():
    return [masked(length, index % 3 > 0) for index, length in enumerate(LENGTHS)]


def symbolic_captures(caplog) -> int:
    return sum("symbols" in message for message in caplog.messages)


def test_a_family_for_each_answer():
    torch.manual_seed(0)
    batches = masked_batches()
    step = WholeStep(Masked(), ADAMW, batches[0]).run(batches).step
    assert step.stats.families == 2
    assert_served(step)


def test_a_family_for_each_answer_in_an_own_loop():
    torch.manual_seed(0)
    batches = masked_batches()
    loop = OwnLoop(Masked(), batches[0][:-1]).run(batches)
    assert loop.step.stats.families == 2
    loop.assert_served()


def test_a_family_for_each_answer_in_inference():
    torch.manual_seed(0)
    step = check_inference(Masked(), [batch[:-1] for batch in masked_batches()], 1)
    assert step.stats.families == 2


def _asks_twice(self, x):
    hidden = self.layer(x)
    if (x > 9).any():
        return hidden
    return hidden * 2 if (torch.arange(x.shape[0]) < 8).all() else hidden * 3


def test_questions_about_sizes_and_inputs():
    torch.manual_seed(0)
    pair = WholeStep(Written(_asks_twice, layer=nn.Linear(12, 5)), MOMENTUM, vectors(4))
    for index, batch in enumerate((4, 6, 9, 12, 5, 20, 3, 8, 9, 30)):
        x, target = vectors(batch)
        pair.train((x + 10 * (index % 4 == 3), target))
    pair.compare()
    assert pair.step.stats.families == 3


class Annealed:
    """A loss with a weight that its owner changes."""

    def __init__(self, function=lambda loss, weight: loss * weight) -> None:
        self.weight, self.function = 0.25, function

    def __call__(self, outputs, target):
        outputs, target = (outputs.flatten(0, 1), target.flatten()) if target.dim() > 1 else (outputs, target)
        return self.function(F.cross_entropy(outputs, target), self.weight)


@pytest.mark.parametrize("loop", ["own", "whole"])
def test_numbers_and_sizes_become_symbols_in_one_capture(caplog, loop):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")
    loss_fn = Annealed()
    if loop == "whole":
        pair = WholeStep(Encoder(), ADAMW, words(4, 9), loss_fn)
    else:
        pair = OwnLoop(Encoder(), words(4, 9)[:1], ADAMW, loss_fn)
    for length in LENGTHS:
        loss_fn.weight += 0.1
        pair.train(words(4, length))
    pair.compare()
    assert pair.step.stats.families == 1
    assert symbolic_captures(caplog) == 1
    assert_served(pair.step)


def test_a_number_in_the_model_beside_sizes(caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")

    def tempered(self, x):
        return self.layer(x) / (self.temperature * x.shape[0])

    model = Written(tempered, layer=nn.Linear(12, 5))
    model.temperature = 5.0
    pair = OwnLoop(model, vectors(4)[:1])
    for batch in (4, 6, 3, 9, 6, 5, 2):
        pair.change(lambda model: setattr(model, "temperature", model.temperature - 0.25))
        pair.train(vectors(batch))
    pair.compare()
    assert pair.step.stats.families == 1
    assert symbolic_captures(caplog) == 1


def test_a_number_that_changes_once_there_is_a_family(caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")
    loss_fn = Annealed()
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 9), loss_fn)
    for step, length in enumerate(LENGTHS):
        loss_fn.weight += 0.1 * (step > 3)
        pair.train(words(4, length))
    pair.compare()
    assert symbolic_captures(caplog) == 2
    assert pair.step.stats.families == 1


def test_sizes_that_change_once_a_number_is_late(caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "olla_fx")
    loss_fn = Annealed()
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 9), loss_fn)
    for length in (9, 9, 9, *LENGTHS):
        loss_fn.weight += 0.1
        pair.train(words(4, length))
    pair.compare()
    assert symbolic_captures(caplog) == 1
    assert pair.step.stats.families == 1


def test_a_family_for_each_decision():
    torch.manual_seed(0)
    loss_fn = Annealed(lambda loss, weight: loss * weight if weight > 1 else loss + weight)
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 9), loss_fn)
    for step, length in enumerate((*LENGTHS, *LENGTHS)):
        loss_fn.weight = 0.2 * (step + 1) if step < 12 else 0.01 * step
        pair.train(words(4, length))
    pair.compare()
    assert pair.step.stats.families == 2


class FallingStep(WholeStep):
    """A whole step of which some calls run in eager: there is nothing to say of their arrays."""

    def _check_service(self, batch):
        pass


def test_the_other_branch_of_a_number_that_changes_at_every_call_is_planned():
    torch.manual_seed(0)
    loss_fn = Annealed(lambda loss, weight: loss * weight if weight > 1 else loss + weight)
    pair = FallingStep(Encoder(), MOMENTUM, words(4, 9), loss_fn, fallback="eager")
    for index in range(40):
        loss_fn.weight = 0.05 * (index + 1)
        pair.train(words(4, 3 + index * 7 % 23))
    pair.compare()
    assert pair.step.stats.families == 2
    assert pair.step.stats.eager_runs <= 6
    assert_served(pair.step)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            lambda loss, weight: loss * (weight if isinstance(weight, float) else 1.0),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda loss, weight: loss * float(weight), marks=pytest.mark.slow),
        lambda loss, weight: loss * torch.tensor(weight),
    ],
    ids=["isinstance", "float", "tensor"],
)
def test_a_number_that_stays_a_constant_has_a_family_for_each_value(function):
    torch.manual_seed(0)
    loss_fn = Annealed(function)
    pair = WholeStep(Encoder(), MOMENTUM, words(4, 9), loss_fn)
    for step, length in enumerate(LENGTHS):
        loss_fn.weight = 0.5 + step // 4
        pair.train(words(4, length))
    pair.compare()
    assert pair.step.stats.families == 3


def test_answers_numbers_and_sizes():
    torch.manual_seed(0)
    loss_fn = Annealed()
    batches = masked_batches()
    pair = WholeStep(Masked(), ADAMW, batches[0], loss_fn)
    for batch in (*batches, *masked_batches()):
        loss_fn.weight += 0.1
        pair.train(batch)
    pair.compare()
    assert pair.step.stats.families == 2


def test_a_loop_with_masks_and_a_number_settles_in_plans():
    torch.manual_seed(0)
    loss_fn, model = Annealed(), Masked()
    optimizer = ADAMW(model.parameters())
    step = olla_fx.optimize(model, masked(9, 1), loss_fn=loss_fn, optimizer=optimizer, solver="none")
    for index in range(60):
        loss_fn.weight += 0.1
        step(*masked(3 + index * 7 % 23, int(index % 5 > 0)))
    assert step.stats.eager_runs <= 6
    assert step.stats.families == 2


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_transformers_with_masks_of_any_length(name, kernels):
    torch.manual_seed(0)
    hugging_face = make_transformer(name, kernels)
    model = Written(lambda self, x, mask: self.body(x, attention_mask=mask).logits, body=hugging_face)
    loss_fn = Annealed()

    def batch(length: int, side: int):
        x, target = texts(4, length) if name == "bert" else words(4, length)
        mask = torch.ones(4, length, dtype=torch.long)
        mask[-1, [slice(0, 0), slice(length - 1, None), slice(0, 1)][side]] = 0
        return x, mask, target % 2 if name == "bert" else target

    pair = WholeStep(model, ADAMW, batch(9, 0), loss_fn)
    for index, length in enumerate((9, 12, 5, 7, 15, 3, 12, 8, 6, 10)):
        loss_fn.weight += 0.1
        pair.train(batch(length, index % 3))
    pair.compare()
    # Without fused kernels GPT-2 and Llama ask nothing.
    assert pair.step.stats.families == (1 if kernels == "eager" and name != "bert" else 2)


class Longest(nn.Module):
    """Averages the first words, as many as Python is told."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 5)

    def forward(self, x, counts):
        return self.head(self.words(x)[:, : max(counts.tolist())].mean(1))


def test_a_loop_whose_inputs_keep_answering_otherwise_is_told():
    torch.manual_seed(0)
    step = olla_fx.optimize(Longest(), (texts(4, 30)[0], torch.full((4,), 3)), solver="none")

    def train() -> None:
        for index in range(40):
            x, target = texts(4, 30 + index)
            F.cross_entropy(step(x, torch.full((4,), 4 + index % 25)), target).backward()

    with pytest.warns(RuntimeWarning, match=r"input 1 is \[\d+.*, and was .* each answer needs a plan"):
        train()


def test_a_number_becomes_an_input_though_sizes_stay_numbers():
    torch.manual_seed(0)
    loss_fn = Annealed()
    pair = WholeStep(Unrolled(), MOMENTUM, texts(4, 2), loss_fn)
    for length in (2, 3, 2, 3, 2, 3, 2):
        loss_fn.weight += 0.1
        pair.train(texts(4, length))
    pair.compare()
    assert pair.step.stats.families == 0
    assert pair.step.stats.cached_plans == 4


def test_dimensions_of_one_element():
    torch.manual_seed(0)

    def forward(self, x):
        hidden = self.layer(x).unsqueeze(0).transpose(0, 1)
        return (hidden * torch.arange(5.0)).squeeze(1)

    pair = WholeStep(Written(forward, layer=nn.Linear(12, 5)), MOMENTUM, vectors(4))
    for batch in (4, 6, 3, 9, 6, 5):
        pair.train(vectors(batch))
    pair.compare()
    assert pair.step.stats.families == 1
