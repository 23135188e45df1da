"""A loss that belongs to an object: what it reads of that is guarded, nothing else is."""

import copy
import logging
import threading
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.comparisons import assert_same_models
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import ADAMW, mlp, sgd, vectors

FACTOR = SimpleNamespace(value=1.0)


@dataclass
class Settings:
    """Nested in a trainer."""

    factor: float = 1.0
    power: str = "two"
    seen: list = field(default_factory=list)
    inner: "Settings | None" = None


class Slotted:
    """Has no dictionary."""

    __slots__ = ("__hidden", "kind", "unread")

    def __init__(self):
        self.kind, self.unread, self.__hidden = "plain", 0, 1.0

    def hide(self, value):
        self.__hidden = value

    def shown(self):
        return self.__hidden


class Fallback:
    """Finds what it does not have elsewhere."""

    def __init__(self):
        self.values, self.unread = {"factor": 1.0}, 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.values[name]


class Profiler:
    """Ends what it began."""

    def __init__(self):
        self.lines, self.factor = [], 1.0

    def __del__(self):
        self.lines.clear()


class Trainer:
    """Holds all that a loop needs, of which the loss reads little."""

    shared = 1.0

    def __init__(self, read):
        self.read = read
        self.model = mlp()
        self.optimizer = sgd(self.model.parameters())
        self.history, self.counts, self.steps = [], {"calls": 0}, 0
        self.factor, self.weights = 1.0, [1.0, 2.0]
        self.settings = Settings(inner=Settings(inner=Settings(inner=Settings())))
        self.slotted, self.fallback = Slotted(), Fallback()
        self.parts = [Settings(), Settings()]
        self.namespace = SimpleNamespace(factor=1.0)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.other_model = mlp()
        self.lock = threading.Lock()
        self.logger = logging.getLogger("trainer")
        self.batches = iter(DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2))
        self.myself, self.profiler = self, Profiler()

    def loss(self, answer, target):
        return F.cross_entropy(answer, target) * self.read(self)

    __call__ = loss

    @property
    def doubled(self):
        return self.factor * 2

    @cached_property
    def kept(self):
        return self.factor * 2

    def advance(self, loss):
        """Do what a loop does between two steps."""
        self.history.append(float(loss))
        self.steps += 1
        self.counts["calls"] += 1
        self.settings.seen.append(1)
        self.slotted.unread += 1
        self.fallback.unread += 1


class Loop(WholeStep):
    """A trainer for each half, which holds the planned step."""

    def __init__(self, read, of=lambda trainer: trainer.loss, make=sgd):
        self.trainers = [Trainer(read), Trainer(read)]
        for trainer in self.trainers:
            trainer.model.load_state_dict(self.trainers[0].model.state_dict())
        eager, planned = self.trainers
        super().__init__(planned.model, make, vectors(1)[0], of(planned), eager=eager.model)
        self.loss_fn = of(eager)
        for trainer, optimizer in zip(self.trainers, self.optimizers, strict=True):
            trainer.optimizer = optimizer
        planned.step = self.step

    def train(self, batch):
        super().train(batch)
        for trainer in self.trainers:
            trainer.advance(1.0)

    def set(self, change):
        for trainer in self.trainers:
            change(trainer)
        return self


def _helped(trainer):
    return trainer.settings.factor


def _by_name(trainer):
    return getattr(trainer, "factor") if hasattr(trainer, "factor") else 1.0  # noqa: B009


def _through_itself(trainer):
    return trainer.myself.myself.settings.inner.inner.inner.factor


READS = {
    "attribute": (lambda it: it.factor, lambda it: setattr(it, "factor", 2.0)),
    "by name": (_by_name, lambda it: setattr(it, "factor", 2.0)),
    "helper": (_helped, lambda it: setattr(it.settings, "factor", 2.0)),
    "replaced": (_helped, lambda it: setattr(it, "settings", Settings(factor=2.0))),
    "deep": (_through_itself, lambda it: setattr(it.settings.inner.inner.inner, "factor", 2.0)),
    "list": (lambda it: it.weights[1], lambda it: it.weights.__setitem__(1, 3.0)),
    "grown": (lambda it: len(it.weights), lambda it: it.weights.append(3.0)),
    "objects": (lambda it: sum(p.factor for p in it.parts), lambda it: setattr(it.parts[1], "factor", 2.0)),
    "property": (lambda it: it.doubled, lambda it: setattr(it, "factor", 2.0)),
    "slots": (
        lambda it: 2.0 if it.slotted.kind == "odd" else 1.0,
        lambda it: setattr(it.slotted, "kind", "odd"),
    ),
    "private slot": (lambda it: it.slotted.shown(), lambda it: it.slotted.hide(2.0)),
    "fallback": (lambda it: it.fallback.factor, lambda it: it.fallback.values.update(factor=2.0)),
    "no fallback": (lambda it: it.fallback.factor, lambda it: setattr(it.fallback, "factor", 2.0)),
    "of the class": (lambda it: it.shared, lambda it: setattr(it, "shared", 2.0)),
    "absent": (lambda it: getattr(it, "late", 1.0), lambda it: setattr(it, "late", 2.0)),
    "removed": (_by_name, lambda it: delattr(it, "factor")),
    "whole": (lambda it: vars(it.settings)["factor"], lambda it: setattr(it.settings, "factor", 2.0)),
    "copied": (lambda it: copy.copy(it.settings).factor, lambda it: setattr(it.settings, "factor", 2.0)),
    "ended": (lambda it: it.profiler.factor, lambda it: setattr(it.profiler, "factor", 2.0)),
    "namespace": (lambda it: it.namespace.factor, lambda it: setattr(it.namespace, "factor", 2.0)),
    "module": (
        lambda it: it.criterion.label_smoothing,
        lambda it: setattr(it.criterion, "label_smoothing", 0.3),
    ),
    "method": (lambda it: it.read_more(), lambda it: setattr(it, "read_more", lambda: 2.0)),
    "branch": (
        lambda it: it.factor if it.settings.power == "one" else 1.5,
        lambda it: (setattr(it.settings, "power", "one"), setattr(it, "factor", 3.0)),
    ),
}  # fmt: skip
Trainer.read_more = lambda self: self.settings.factor


@pytest.mark.parametrize(("read", "change"), READS.values(), ids=READS)
def test_what_the_loss_reads_is_guarded(read, change):
    pair = Loop(read)
    if read in (READS["whole"][0], READS["copied"][0]):
        pair.set(lambda trainer: setattr(trainer, "advance", lambda loss: None))
    pair.run(vectors(3))
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (0, 1)
    pair.set(change).run(vectors(3))
    assert pair.step.stats.replans == 1
    assert pair.step.stats.eager_runs == 0


@pytest.mark.parametrize(
    "of",
    [
        lambda trainer: trainer,
        lambda trainer: partial(trainer.loss),
        lambda trainer: lambda answer, target: trainer.loss(answer, target),
        lambda trainer: lambda answer, target: F.cross_entropy(answer, target) * trainer.factor,
    ],
    ids=["object", "partial", "closure", "field in closure"],
)
def test_an_object_that_a_loss_reaches_otherwise(of):
    pair = Loop(lambda trainer: trainer.factor, of).run(vectors(3))
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (0, 1)
    pair.set(lambda trainer: setattr(trainer, "factor", 2.0)).run(vectors(3))
    assert (pair.step.stats.replans, pair.step.stats.eager_runs) == (1, 0)


def test_a_global_variable_that_a_method_reads(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", Settings())
    pair = Loop(lambda trainer: FACTOR.factor).run(vectors(2))
    FACTOR.seen.append(1)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0
    FACTOR.factor = 2.0
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1


@pytest.mark.parametrize(
    "read",
    [lambda it: 1.0 - 0.5**it.steps, lambda it: min(1.0, 0.5 + it.steps / 20)],
    ids=["power", "limit"],
)
def test_a_counter_that_the_loss_reads_is_bound_late(read):
    pair = Loop(read, make=ADAMW).set(lambda trainer: setattr(trainer, "steps", 1))
    pair.run(vectors(16))
    plans = pair.step.stats.cached_plans
    assert plans <= 4
    pair.run(vectors(8))
    assert pair.step.stats.cached_plans == plans


def test_a_module_that_the_loss_does_not_read_is_no_part_of_the_step():
    pair = Loop(lambda trainer: 1.0).run(vectors(2))
    pair.set(lambda trainer: trainer.other_model.eval().requires_grad_(False))
    pair.set(lambda trainer: delattr(trainer, "other_model"))
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0
    assert not any(
        "other_model" in item.name for item in pair.step._plans.current.executor.step.captured.inputs
    )


def write(trainer):
    trainer.factor = 2.0
    return trainer.factor


def write_unread(trainer):
    trainer.new = 2.0
    return 1.0


def count(trainer):
    trainer.settings.factor += 1
    return 1.0


def remove(trainer):
    del trainer.factor
    return 1.0


def append(trainer):
    trainer.history.append(1.0)
    return 1.0


def write_in_dictionary(trainer):
    vars(trainer.settings)["factor"] = 2.0
    return 1.0


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (write, "'Trainer.factor'"),
        (write_unread, "'Trainer.new'"),
        (count, "'Settings.factor'"),
        (remove, "'Trainer.factor'"),
        (append, "'Trainer.history'"),
        (write_in_dictionary, "'Settings.factor'"),
        (lambda trainer: trainer.kept, "'Trainer.kept'"),
    ],
)
def test_a_loss_that_changes_its_object_is_refused(read, said):
    trainer = Trainer(read)
    before = copy.copy(vars(trainer)), copy.copy(vars(trainer.settings)), [*trainer.history]
    example = vectors(1)[0]
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(CaptureError, match=f"changes its attribute {said}"):
            function(trainer.model, example, loss_fn=trainer.loss, optimizer=trainer.optimizer)
    assert before == (vars(trainer), vars(trainer.settings), trainer.history)


def test_what_cannot_be_copied_is_refused_if_it_is_read():
    trainer = Trainer(lambda it: 1.0 if it.lock else 2.0)
    with pytest.raises(CaptureError, match="'lock' of Trainer, which the loss reads, cannot be copied"):
        olla_fx.optimize(trainer.model, vectors(1)[0], loss_fn=trainer.loss, optimizer=trainer.optimizer)


def test_classes_are_as_they_were():
    kinds = {kind: dict(vars(kind)) for kind in (Trainer, Settings, Slotted, Fallback)}
    pair = Loop(lambda it: it.factor + it.settings.factor + it.slotted.shown()).run(vectors(2))
    assert kinds == {kind: dict(vars(kind)) for kind in kinds}
    assert pair.step.report()


def test_a_copy_of_a_step_that_its_trainer_holds():
    pair = Loop(lambda trainer: trainer.factor).run(vectors(2))
    for trainer in pair.trainers:
        for name in ("lock", "batches"):
            delattr(trainer, name)
    step = copy.deepcopy(pair.step)
    trainer = step._request.loss_fn.__self__
    assert trainer.step is step is not pair.step
    eager = copy.deepcopy(pair.trainers[0])
    for x, y in vectors(4):
        eager.optimizer.zero_grad()
        loss = eager.loss(eager.model(x), y)
        loss.backward()
        eager.optimizer.step()
        assert torch.equal(trainer.step(x, y), loss.detach())
    assert_same_models(eager.model, trainer.model)
    assert_same_models(pair.trainers[0].model, pair.model)
