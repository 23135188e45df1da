"""Runs a model in eager and planned, and compares the two bit for bit.

There is one class for each way to run a model planned: :class:`WholeStep` (forward, backward and optimizer in
one call), :class:`OwnLoop` (the caller's loop around a planned model), :class:`CompiledLoop`
(``torch.compile(model, backend="olla_fx")``), and the function :func:`check_inference`. Each fills the buffer
with 0xFF bytes before a call, so that nothing passes which reads what an earlier call has left there.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

import olla_fx
from olla_fx import PlannedModule, dynamo
from olla_solvers.plan import MemoryPlan
from tests.olla_fx.comparisons import (
    assert_same,
    assert_same_gradients,
    assert_same_models,
    assert_same_optimizers,
    random_states,
)
from tests.olla_fx.helpers import sgd

Batch = tuple[Any, ...]
Loss = Callable[..., torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

# Where the arrays of a run were


def assert_served(step: PlannedModule, outputs: int | None = None, *, outside: int = 0) -> None:
    """Assert that the last run's arrays were in the buffer.

    Args:
        step: what ran.
        outputs: number of storages that the caller got; None for any.
        outside: number of requests that are allowed to be served outside although they were expected inside.
    """
    told = step.stats
    assert told.binding == "buffer"
    assert told.counts.served > 0
    assert told.counts.outside == outside, told.outside_log
    assert outputs is None or told.counts.outputs == outputs


_plans_that_ran: weakref.WeakValueDictionary[int, MemoryPlan] = weakref.WeakValueDictionary()


def assert_served_if_settled(step: PlannedModule, outputs: int | None = None) -> bool:
    """Assert that the last run's arrays were in the buffer, unless that run was a plan's first.

    The first run of a plan is recorded and ends in a new plan with the kernels' workspaces; on CUDA, a run
    to warm up precedes it.

    Returns:
        True if the run was of a settled plan.
    """
    memory = step.plan.memory
    if id(memory) not in _plans_that_ran:
        _plans_that_ran[id(memory)] = memory
        assert step.stats.binding == "buffer"
        return False
    assert_served(step, outputs)
    return True


# A model in eager and planned


class Side(NamedTuple):
    """One half of a pair.

    Attributes:
        called: what is called: the model itself in eager, the planned module otherwise.
        model: the model.
        optimizer: over its parameters.
    """

    called: Callable[..., Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer


class EagerAndPlanned:
    """One model twice, from the same weights.

    Attributes:
        eager: the copy that runs in eager.
        model: the model that is planned.
        step: what runs it planned.
        optimizers: of ``eager`` and of ``model``.
        calls: number of steps so far, the seed of the next one.
    """

    step: Any

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, eager: nn.Module | None = None
    ) -> None:
        self.eager, self.model = eager or copy.deepcopy(model), model
        self.eager.load_state_dict(model.state_dict())
        self.optimizers = [make_optimizer(half.parameters()) for half in (self.eager, model)]
        self.calls = 0

    def sides(self) -> tuple[Side, Side]:
        """Return the eager and the planned half, to do the same with both."""
        return (
            Side(self.eager, self.eager, self.optimizers[0]),
            Side(self.step, self.model, self.optimizers[1]),
        )

    def change(self, what: Callable[[nn.Module], object]) -> None:
        """Change both models in the same way."""
        for _, model, _ in self.sides():
            what(model)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        """Let both optimizers make a step."""
        for optimizer in self.optimizers:
            optimizer.step()

    def planned_modules(self) -> list[PlannedModule]:
        """Return the planned modules that run the model."""
        return [self.step]

    def poison(self) -> None:
        """Fill every buffer that is free."""
        for module in self.planned_modules():
            if not module.stats.is_busy:
                module.poison()

    def replan(self) -> None:
        """Let every planned module forget its plans."""
        for module in self.planned_modules():
            module.replan()

    def run_loop(
        self,
        loop: Callable[[Callable[..., Any], nn.Module], object],
        compare: Callable[..., None] = assert_same,
    ) -> None:
        """Run a function of what is called and of its model for both, and compare what it returns and leaves.

        Gradients are compared as told; everything else bit for bit.
        """
        self.poison()
        states, answers = [], []
        for called, model, _ in self.sides():
            torch.manual_seed(self.calls)
            answers.append(loop(called, model))
            states.append(random_states())
        self.calls += 1
        assert_same(*answers, f"answer of call {self.calls}")
        assert_same(*states, "random numbers drawn")
        assert_same(*(dict(model.named_buffers()) for _, model, _ in self.sides()), "buffers")
        self.compare_gradients(compare)
        del answers
        assert not any(module.stats.is_busy for module in self.planned_modules())

    def train(self, batch: Batch) -> None:
        """Run one training step of both, compared."""
        raise NotImplementedError

    def compare_gradients(self, compare: Callable[..., None] = assert_same) -> None:
        """Compare the gradients that both models hold."""
        assert_same_gradients(self.eager, self.model, compare)

    def compare(self) -> None:
        """Compare weights, buffers and optimizer state."""
        assert_same_models(self.eager, self.model)
        assert_same_optimizers(*self.optimizers)

    def run(self, batches: Iterable[Batch]) -> Self:
        """Train on some batches, comparing every step, and the models after the last one."""
        for batch in batches:
            self.train(batch)
        self.compare()
        return self


class WholeStep(EagerAndPlanned):
    """A training step that is planned as a whole, against the same step in eager."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        example: Batch,
        loss_fn: Loss = F.cross_entropy,
        *,
        eager: nn.Module | None = None,
        scheduler: Scheduler | None = None,
        outputs: int = 1,
        runs_to_settle: int = 1,
        **options: Any,
    ) -> None:
        """Plan a model's step.

        Args:
            model: to be planned; its copy runs in eager.
            make_optimizer: called with the parameters of each.
            example: inputs and target.
            loss_fn: of outputs and target.
            eager: a model like it, if it cannot be copied.
            scheduler: makes a schedule of an optimizer; it advances after every step.
            outputs: number of storages that a call returns.
            runs_to_settle: most runs of a plan that are recorded.
            options: of :func:`olla_fx.optimize`.
        """
        super().__init__(model, make_optimizer, eager)
        self.schedulers = [scheduler(optimizer) for optimizer in self.optimizers] if scheduler else []
        self.loss_fn = loss_fn
        self.return_outputs = options.get("return_outputs", False)
        self.outputs = outputs
        self._runs_to_settle = runs_to_settle
        self._forgets = "cache_size_limit" in options
        self._kinds_of_batches: set[str] = set()
        self._unsettled_runs = 0
        options = {"solver": "none", "fallback": "raise", **options}
        self.step = olla_fx.optimize(model, example, loss_fn=loss_fn, optimizer=self.optimizers[1], **options)

    def train_eager(self, batch: Batch) -> Any:
        """Run one step of the eager model; return what the planned step is to return."""
        *inputs, target = batch
        self.optimizers[0].zero_grad()
        outputs = self.eager(*inputs)
        loss = self.loss_fn(outputs, target)
        loss.backward()
        self.optimizers[0].step()
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        return (loss.detach(), detached) if self.return_outputs else loss.detach()

    def train(self, batch: Batch) -> None:
        """Run one step of both; compare answers, inputs, random numbers and where arrays were."""
        batch, same_batch = pytree.tree_map_only(torch.Tensor, torch.clone, (batch, batch))
        torch.manual_seed(self.calls)
        expected = self.train_eager(batch)
        states = random_states()
        self.step.poison()
        torch.manual_seed(self.calls)
        given = self.step(*same_batch)
        self.calls += 1
        assert_same(expected, given, f"answer of step {self.calls}")
        assert_same(batch, same_batch, "inputs")
        assert all(map(torch.equal, states, random_states())), "random numbers drawn"
        self._check_service(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for scheduler in self.schedulers:
                scheduler.step()

    def replan(self) -> None:
        """Let the planned module forget its plans; all kinds of batches are new to it."""
        super().replan()
        self._kinds_of_batches.clear()
        self._unsettled_runs = 0

    def _check_service(self, batch: Batch) -> None:
        """Check where arrays were, and that only new kinds of batches, answers and replans led to plans."""
        self._kinds_of_batches.add(repr(pytree.tree_map_only(torch.Tensor, _kind, batch)))
        self._unsettled_runs += not assert_served_if_settled(self.step, self.outputs)
        warm_ups = any(parameter.is_cuda for parameter in self.model.parameters())
        told = self.step.stats
        plans = max(len(self._kinds_of_batches), told.cached_plans) + told.replans
        assert self._forgets or self._unsettled_runs <= plans * (self._runs_to_settle + warm_ups)


class OwnLoop(EagerAndPlanned):
    """The caller's own loop around a planned model, against the same loop in eager."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        make_optimizer: MakeOptimizer = sgd,
        loss_fn: Loss = F.cross_entropy,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> None:
        """Plan a model's forward and backward.

        Args:
            model: to be planned; its copy runs in eager.
            example: inputs.
            make_optimizer: called with the parameters of each.
            loss_fn: of outputs and target.
            context: what forward and loss run in, such as autocast.
            options: of :func:`olla_fx.optimize`.
        """
        super().__init__(model, make_optimizer)
        self.loss_fn, self.context = loss_fn, context
        self.step = olla_fx.optimize(model, example, **{"solver": "none", "fallback": "raise", **options})

    def losses(self, batch: Batch) -> list[torch.Tensor]:
        """Run forward and loss of both from the same random numbers, and return the losses, compared."""
        *inputs, target = batch
        self.poison()
        losses = []
        for called, _, _ in self.sides():
            torch.manual_seed(self.calls)
            with self.context():
                losses.append(self.loss_fn(called(*inputs), target))
        self.calls += 1
        assert_same(losses[0].detach(), losses[1].detach(), f"loss of step {self.calls}")
        return losses

    def train(self, batch: Batch) -> None:
        """Run one step of both; compare losses and gradients."""
        self.zero_grad()
        assert not self.step.stats.is_busy
        for loss in self.losses(batch):
            loss.backward()
        self.compare_gradients()
        self.update()

    def assert_served(self, *, stock_runs: int = 0) -> None:
        """Assert that the last run's arrays were in the buffer, which is free again.

        Args:
            stock_runs: number of calls so far that found the buffer taken.
        """
        assert_served(self.step)
        assert not self.step.stats.is_busy
        assert self.step.stats.stock_runs == stock_runs


class CompiledLoop(EagerAndPlanned):
    """A model that ``torch.compile`` hands to the backend, against the same loop in eager.

    Attributes:
        pieces: what the backend made of each graph.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """Compile a model with options of ``torch.compile``."""
        super().__init__(model, sgd)
        self.pieces: list[Any] = []
        self.step = torch.compile(model, backend=self._backend, **options)

    def _backend(self, graph_module: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        piece = dynamo.backend(graph_module, example_inputs, **options)
        self.pieces.append(piece)
        return piece

    def planned_modules(self) -> list[PlannedModule]:
        """Return the planned modules of all pieces that could be planned."""
        return [piece.module for piece in self.pieces if piece.module is not None]

    def train(self, batch: Batch) -> None:
        """Run one step of both; compare losses and gradients."""
        x, y = batch

        def loop(called: Callable[..., Any], _: nn.Module) -> torch.Tensor:
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            return loss.detach()

        self.zero_grad()
        self.run_loop(loop)
        self.update()
        assert not any(module.stats.stock_runs for module in self.planned_modules())

    def assert_served(self, pieces: int) -> None:
        """Assert that there are so many pieces, each with its arrays in a buffer of its own."""
        assert len(self.pieces) == len(self.planned_modules()) == pieces
        for module in self.planned_modules():
            assert_served(module)


def check_inference(
    model: nn.Module, examples: Sequence[Batch], outputs: int | None, **options: Any
) -> PlannedModule:
    """Plan a model's inference on the first example and compare with eager on all.

    Args:
        model: put into eval mode.
        examples: inputs of each call.
        outputs: number of storages that a call returns; None for any.
        options: of :func:`olla_fx.optimize`.
    """
    model.eval()
    step = olla_fx.optimize(model, examples[0], **{"solver": "none", "fallback": "raise", **options})
    for index, example in enumerate(examples, 1):
        with torch.no_grad():
            expected = model(*example)
        step.poison()
        assert_same(expected, step(*example), f"answer of call {index}")
        assert_served_if_settled(step, outputs)
    return step


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
