"""The guards of one plan: a generated prologue, and the exact comparison behind it.

As Lightning Thunder's prologue, the generated function checks that a plan fits and gathers the values of its
placeholders. If it is not sure, the exact comparison decides; if nothing really changed, the prologue is
written anew for the present objects, else the plan is not used and the reason is said. A state that the plan
does not fit, and that lasts, gets a function of its own, which tells that nothing has changed since.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.errors import StepInputError
from olla_fx.guards.exact import Assumptions, ExactComparison
from olla_fx.guards.inputs import WANTS_GRADIENT, Mode, Role, step_modules
from olla_fx.guards.numbers import NumberSlot, changed
from olla_fx.guards.optimizer import InitialState, OptimizerGuard
from olla_fx.guards.source import prologue_source

_NOT_SURE = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors that the generated function raises if something is absent."""

_UNCHECKED = (Role.SCALAR, Role.NUMBER, Role.EXAMPLE)
"""Placeholders whose values are no tensors, or are told apart before a plan is asked."""


Changes = tuple[tuple[str, object], ...]
"""What model and settings differ in from what a plan assumes: what is said, and what is new."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The reason why a plan no longer fits."""

    reason: str


@dataclass(frozen=True, slots=True)
class _OtherState:
    """The state of model and settings at a call for which there was no plan.

    Attributes:
        changes: what differs from what the plan assumes.
        lasts: returns None once something has changed since; None if there is no such function.
        has_writes: True if what a first forward writes was there.
    """

    changes: Changes
    lasts: Callable[[], object] | None = None
    has_writes: bool = False


class Prologue:
    """Checks if a plan fits a call, and gathers the values of its placeholders.

    Nothing is held between calls but modules and Python values: ``load_state_dict(assign=True)`` replaces
    parameters, ``optimizer.load_state_dict`` replaces state and groups, ``.to()`` changes types in place.

    Attributes:
        source: the text of the generated function; empty before the first exact comparison.
    """

    def __init__(
        self,
        assumed: Assumptions,
        model: nn.Module,
        loss_fn: object,
        optimizer: torch.optim.Optimizer | None,
        initial_state: InitialState,
        *,
        differentiates: bool = False,
    ) -> None:
        """Prepare the guards; the generated function is made when they are first asked.

        Args:
            assumed: what the plan assumes.
            model: the user's.
            loss_fn: the user's, or None.
            optimizer: the user's, or None.
            initial_state: makes the state that the optimizer's first step would.
            differentiates: True if the plan is for calls that would make a graph for autograd.
        """
        self._assumed = assumed
        self._has_writes = bool(assumed.writes)
        self._modules = functools.partial(step_modules, model, loss_fn, assumed.reads.fields)
        modules = self._modules()
        self._places = [(slot, modules[slot.owner]) for slot, *_ in assumed.slots]
        self._optimizer: OptimizerGuard | None = None
        if optimizer is not None and assumed.optimizer is not None:
            holders = {slot.name: (module, slot.key) for slot, module in self._places}
            specs = {item.name: item.spec for item in assumed.inputs if item.role is Role.STATE}
            state = {
                name: {key: specs[f"{name}.{key}"] for key in keys}
                for name, keys in assumed.state_keys.items()
            }
            self._optimizer = OptimizerGuard(optimizer, assumed.optimizer, state, holders, initial_state)
        self._exact = ExactComparison(assumed, self._modules, self._optimizer, differentiates=differentiates)
        self._generated: Callable[[], tuple[list[torch.Tensor], list[Any]] | None] | None = None
        self._code: types.CodeType | None = None
        self._other = _OtherState(())
        self.source = ""

    def check(self, examples: Sequence[torch.Tensor]) -> list[Any] | None:
        """Return the values of all placeholders, in order; None if it takes the exact comparison.

        Args:
            examples: the caller's tensors, flat, of the kinds that were planned for.

        Raises:
            StepInputError: as :meth:`run`.
        """
        gathered = self._gathered()
        if gathered is None:
            return None
        tensors, values = gathered
        self._refuse_inputs(examples)
        values = [*values, *examples]
        # Two tensors of the model that became one lie in one storage.
        checked = [*tensors, *examples] if self._assumed.written else tensors
        if not torch_compat.in_different_storages(checked):
            if self._exact.lost() is not None:
                return None
            self._refuse_overlaps(values)
        return values

    def _gathered(self) -> tuple[list[torch.Tensor], list[Any]] | None:
        """Return the step's tensors, and all values before the inputs; None if only comparing can tell."""
        if self._generated is None or (self._optimizer is not None and self._optimizer.created):
            return None
        try:
            gathered = self._generated()
        except _NOT_SURE:
            return None
        return None if self._has_writes and not self._exact.are_writes_made() else gathered

    def run(self, examples: Sequence[torch.Tensor]) -> list[Any] | Mismatch:
        """Return the values of all placeholders, in order, or why the plan does not fit.

        Args:
            examples: as of :meth:`check`.

        Raises:
            StepInputError: if an input cannot be used, a tensor is on the meta device, or shares its storage
                with one that the step updates.
        """
        values = self.check(examples)
        if values is not None:
            return values
        if self._other.changes and self._is_as_before():
            return Mismatch(self._other.changes[0][0])
        if not self._takes_same_branches():
            return Mismatch("another branch is taken by a number")
        reason = self._exact.why_not()
        if reason is not None:
            return Mismatch(reason)
        values = self.gather(examples)
        self._generate(values)
        return values

    def changes(self) -> Changes:
        """Return what model and settings differ in from what the plan assumes."""
        if self._gathered() is not None:
            return ()
        if self._is_as_before():
            return self._other.changes
        changes = self._exact.changes()
        lasts = None
        # Only for a state that lasts: writing a function takes longer than an exact comparison.
        if changes == self._other.changes and self._exact.lost() is None:
            lasts = self._function_of_now()
        self._other = _OtherState(changes, lasts, self._exact.are_writes_made())
        return changes

    def _function_of_now(self) -> Callable[[], object] | None:
        """Return a function as the generated one for the present state; None if an optimizer has none yet."""
        tensors = [slot.table(module)[slot.key] for slot, module in self._places]
        try:
            of_optimizer, created = self._optimizer.gather() if self._optimizer is not None else ([], {})
            source, objects = self._written([*tensors, *of_optimizer])
        except _NOT_SURE:
            return None
        exec(compile(source, "<another state of a model>", "exec"), objects)
        function: Callable[[], object] = objects["prologue"]
        return None if created else function

    def _takes_same_branches(self) -> bool:
        """Return True if the numbers that are bound late decide as the plan assumes."""
        late = self._assumed.reads.late
        return not late.slots or late.suits(late.gather())

    def _is_as_before(self) -> bool:
        """Return True if nothing has changed since :meth:`changes` found what it did not fit."""
        if self._other.lasts is None:
            return False
        try:
            lasts = self._other.lasts() is not None
        except _NOT_SURE:
            return False
        return lasts and self._exact.are_writes_made() == self._other.has_writes

    def changed_numbers(
        self, are_wanted: Callable[[Iterable[NumberSlot]], bool]
    ) -> dict[NumberSlot, float] | None:
        """Return the numbers for which alone the plan does not fit, as they were; None if there is more.

        Args:
            are_wanted: returns False for numbers that need not be looked at further.
        """
        if self._gathered() is not None:
            return {}
        if not self._takes_same_branches():
            return None
        numbers = self._exact.differing_numbers()
        if not are_wanted(numbers):
            return None
        reasons = {changed(slot) for slot in numbers}
        return numbers if all(reason in reasons for reason, _ in self.changes()) else None

    def fits(self) -> bool:
        """Return True if the plan fits the model as it is now."""
        return self._exact.why_not() is None

    def lost(self) -> str | None:
        """Return which module or tensor the model no longer has, so that the plan will never fit again."""
        return self._exact.lost()

    def undo_created_state(self) -> None:
        """Take back the optimizer state that the last call created, after its run raised."""
        if self._optimizer is not None:
            self._optimizer.undo_created_state()

    def gather(self, examples: Sequence[torch.Tensor]) -> list[Any]:
        """Return the values of all placeholders of a plan that fits; does what a first step does.

        Missing state of the optimizer is created, and what only a first forward writes is written.

        Args:
            examples: as of :meth:`check`.

        Raises:
            StepInputError: as :meth:`run`.
        """
        self._refuse_inputs(examples)
        values: list[Any] = [slot.table(module)[slot.key] for slot, module in self._places]
        for value, (slot, _) in zip(values, self._places, strict=True):
            if value.is_meta:
                raise StepInputError(
                    f"{slot.role} {slot.name} is on the meta device, on which nothing can run: give it "
                    "memory with to_empty and load_state_dict"
                )
        of_optimizer, created = self._optimizer.gather() if self._optimizer is not None else ([], {})
        values += [*of_optimizer, *self._assumed.reads.late.gather(), *examples]
        self._refuse_overlaps(values)
        self._exact.make_first_writes()
        if self._optimizer is not None:  # only now: a call that is refused leaves it as it was
            self._optimizer.keep_created_state(created)
        return values

    def _refuse_inputs(self, examples: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(examples):
            if tensor.is_meta:
                raise StepInputError(f"input {index} is on the meta device, on which nothing can run")
            if tensor.requires_grad and self._assumed.mode is Mode.TRAINING:
                raise StepInputError(f"input {index} {WANTS_GRADIENT}")

    def _refuse_overlaps(self, values: Sequence[Any]) -> None:
        """Refuse two inputs in one storage if the step writes one: the plan knows no order for them."""
        storages = [
            torch_compat.storage_key(value) if isinstance(value, torch.Tensor) and value.numel() else None
            for value in values
        ]
        written = {storages[index]: index for index in self._assumed.written}
        for index, storage in enumerate(storages):
            other = written.get(storage, index)
            if storage is not None and other != index:
                one, two = self._assumed.inputs[index], self._assumed.inputs[other]
                raise StepInputError(
                    f"{one.role} {one.name} shares its storage with {two.role} {two.name}, which the step "
                    "updates: pass a clone of it"
                )

    def _generate(self, values: Sequence[Any]) -> None:
        """Write the generated function for the present objects, and compile it if its text is new."""
        source, objects = self._written(values)
        if self._code is None or source != self.source:
            self._code, self.source = compile(source, "<guards of a plan>", "exec"), source
        exec(self._code, objects)
        self._generated = objects["prologue"]
        self._other = _OtherState(())

    def _written(self, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """Write the function for the present objects; return its text, and the objects by name."""
        source, objects = prologue_source(self._exact, self._optimizer)
        roles = (item.role for item in self._assumed.inputs)
        tensors = [value for value, role in zip(values, roles, strict=False) if role not in _UNCHECKED]
        objects["fit"] = torch_compat.tensors_fit(tensors)
        return source, objects
