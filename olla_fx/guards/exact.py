"""The second tier of the guards: the exact, slow comparison of a model with what a plan assumes.

Everything that is guarded is listed as facts: what is said if it changed, and its value. Those of now are
compared with those of when the plan was made if the generated prologue (:mod:`olla_fx.guards.source`) sees
another object than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.inputs import Facts, Mode, Role, StepInput, TensorSlot
from olla_fx.guards.numbers import NumberSlot
from olla_fx.guards.optimizer import OptimizerGuard, OptimizerLayout
from olla_fx.guards.reads import Reads
from olla_fx.guards.snapshot import Same
from olla_fx.guards.writes import NO_WRITES, FirstWrites


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The assumptions of a plan about model, optimizer and settings.

    Attributes:
        mode: what the step does.
        inputs: what each placeholder is, in order.
        written: indices of the placeholders whose storage the step writes.
        slots: the model's tensors with all their places.
        optimizer: what was assumed of the optimizer, when training.
        state_keys: for each parameter that is updated, the keys of its optimizer state.
        reads: the Python values that were read and baked.
        device: where everything lives.
        writes: what a forward writes on Python attributes the first time, which is assumed to be there.
    """

    mode: Mode
    inputs: tuple[StepInput, ...]
    written: frozenset[int]
    slots: tuple[tuple[TensorSlot, ...], ...]
    optimizer: OptimizerLayout | None
    state_keys: Mapping[str, tuple[str, ...]]
    reads: Reads
    device: torch.device
    writes: FirstWrites = NO_WRITES


class ExactComparison:
    """Compares model, loss and settings with what they were when a plan was made.

    Attributes:
        assumed: what the plan assumes.
        modules: the modules that it was made for, by name.
    """

    def __init__(
        self,
        assumed: Assumptions,
        modules: Callable[[], dict[str, nn.Module]],
        optimizer: OptimizerGuard | None,
        *,
        differentiates: bool,
    ) -> None:
        """Note all facts as they are now.

        Args:
            assumed: what the plan assumes.
            modules: returns the step's modules as they are when it is called.
            optimizer: lists facts of the optimizer, if there is one.
            differentiates: True if the plan is for calls that would make a graph for autograd.
        """
        self.assumed = assumed
        self.modules = modules()
        self._present_modules = modules
        self._optimizer = optimizer
        self._gradients_count = differentiates or assumed.mode is not Mode.INFERENCE
        late = {slot.name for slot in assumed.reads.late.slots}
        with self._writes_assumed():
            self._numbers = [it for it in assumed.reads.numbers() if it[0].name not in late]
            self._planned = {facts: list(facts()) for facts in self._all_facts()}

    def why_not(self) -> str | None:
        """Return why the plan no longer fits; None while it does."""
        with self._writes_assumed():
            return self._first_change(*self._all_facts())

    def changes(self) -> tuple[tuple[str, object], ...]:
        """Return what differs from what the plan assumes: what is said of it, and what is there now."""
        lost = self.lost()
        if lost is not None:  # the other facts are of modules and tensors that are there
            return ((lost, [Same(module) for module in self._present_modules().values()]),)
        with self._writes_assumed():
            return tuple(
                (reason, present)
                for facts in self._all_facts()
                for (reason, present), (_, planned) in zip(facts(), self._planned[facts], strict=False)
                if present != planned
            )

    def differing_numbers(self) -> dict[NumberSlot, float]:
        """Return the numbers that differ and may be inputs of a graph, as they were."""
        with self._writes_assumed():
            present = [(slot, number, slot.read()) for slot, number in self._numbers]
        return {slot: number for slot, number, now in present if _differ(now, number)}

    def lost(self) -> str | None:
        """Return which module or tensor is gone, or has another place or kind; None if none is."""
        return self._first_change(self._structure, self._tensors)

    def make_first_writes(self) -> None:
        """Write on the modules what their first forward writes, if that has not been written."""
        if self.assumed.writes.are_pending(self.modules):
            self.assumed.writes.make(self.modules)

    def _writes_assumed(self) -> AbstractContextManager[None]:
        return self.assumed.writes.assumed(self.modules)

    def _all_facts(self) -> tuple[Callable[[], Facts], ...]:
        reads, optimizer = self.assumed.reads, self._optimizer
        before = self._settings, self._structure, self._flags, reads.facts
        own = (*before, self._writes, self._tensors, self._gradients)
        return own if optimizer is None else (*own, optimizer.facts)

    def _first_change(self, *groups: Callable[[], Facts]) -> str | None:
        for facts in groups:
            for (reason, present), (_, planned) in zip(facts(), self._planned[facts], strict=False):
                if present != planned:
                    return reason
        return None

    def _settings(self) -> Facts:
        autocast = torch_compat.autocast_state(self.assumed.device)
        yield "autocast was switched", autocast if autocast[0] else None
        created = torch_compat.tracing_settings()
        yield "torch's default dtype, its default device or the order of an einsum was switched", created
        settings = torch_compat.kernel_settings()
        yield "the number of threads, oneDNN, the kernels of attention or determinism was switched", settings

    def _structure(self) -> Facts:
        modules = self._present_modules()
        yield "modules were added or removed", len(modules)
        for planned_name, (name, module) in zip(self.modules, modules.items(), strict=True):
            yield f"module {planned_name} became {name}", name
            yield f"module {name} was replaced", Same(module)
            children = [(key, Same(child)) for key, child in torch_compat.children_of(module).items()]
            yield f"module {name} has one of its children in another place", children

    def _flags(self) -> Facts:
        for name, module in self.modules.items():
            yield f"module {name} changed between training and eval", module.training
            yield f"the hooks of module {name} changed", torch_compat.module_hooks(module)

    def _tensors(self) -> Facts:
        holders: dict[int, str] = {}
        for places, step_input in zip(self.assumed.slots, self.assumed.inputs, strict=False):
            for slot in places:
                tensor = slot.table(self.modules[slot.owner]).get(slot.key)
                fits = tensor is not None and step_input.spec is not None and step_input.spec.fits(tensor)
                yield f"{slot.name} changed its shape, layout, dtype or device", fits
                yield f"{slot.name} is tied to others than before", holders.setdefault(id(tensor), slot.name)

    def _writes(self) -> Facts:
        """Yield whether everything is written: what is read is guarded already, the rest may be anything."""
        if self.assumed.writes:
            yield f"{self.assumed.writes.names()} changed", self.are_writes_made()

    def are_writes_made(self) -> bool:
        """Return True if what a first forward writes is there."""
        return self.assumed.writes.are_made(self.modules)

    def _gradients(self) -> Facts:
        """Yield facts about tensors that are all there."""
        for slot, *_ in self.assumed.slots:
            tensor: torch.Tensor = slot.table(self.modules[slot.owner])[slot.key]
            if self._gradients_count or slot.role is Role.PARAMETER:
                yield f"{slot.name} was frozen or unfrozen", tensor.requires_grad
            if self.assumed.mode is Mode.TRAINING and slot.role is Role.PARAMETER:
                yield f"{slot.name} has a gradient hook", torch_compat.tensor_hooks(tensor)


def _differ(one: object, other: object) -> bool:
    return type(one) is not type(other) or repr(one) != repr(other)
