"""A model with a loss over many classes, and the ways to train it."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import sgd

CLASSES = 2051
IGNORED = -100


class Language(nn.Module):
    """Predicts tokens; with labels it returns the loss."""

    def __init__(self, *, tied=False, bias=False, upcast=False, reduction="mean", **options):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.upcast, self.reduction, self.options = upcast, reduction, options

    def forward(self, tokens, labels=None):
        logits = self.head(torch.tanh(self.middle(self.table(tokens))))
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits, labels):
        logits = logits.float() if self.upcast else logits
        given = logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(*given, reduction=self.reduction, **self.options)
        return (loss * 0.5).sum() if self.reduction == "none" else loss


def sentences(count=3, shape=(5, 13), ignored=IGNORED):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        tokens = torch.randint(CLASSES, shape, generator=generator)
        labels = torch.randint(CLASSES, shape, generator=generator)
        batches.append((tokens, labels.masked_fill(labels % 5 == 0, ignored)))
    return batches


def changed(step):
    return {change.rewrite for change in step.plan.changes}


def whole_step(model, batches, optimizer=sgd, **options):
    return WholeStep(model, optimizer, batches[0], model.loss, **options).run(batches)


class WithLoss(nn.Module):
    """Returns the loss alone, as a loop of one's own wants it."""

    def __init__(self, model, returns_logits=False):
        super().__init__()
        self.model, self.returns_logits = model, returns_logits

    def forward(self, tokens, labels):
        if self.returns_logits:
            logits = self.model(tokens)
            return self.model.loss(logits, labels), logits
        return self.model(tokens, labels)


def own_loop(model, batches, **options):
    first = lambda answer, _: answer[0] if isinstance(answer, tuple) else answer  # noqa: E731
    batches = [(tokens, labels, labels) for tokens, labels in batches]
    with options.get("context", nullcontext)():
        pair = OwnLoop(model, batches[0][:2], loss_fn=first, **options)
    return pair.run(batches)


FORMS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "weighted": {"weight": torch.rand(CLASSES)},
    "ignored": {"ignore_index": 3},
    "tied": {"tied": True, "bias": True},
}
