"""Binds numbers of the user's late: they become inputs of the graph when they are seen to change.

While the step is traced a symbolic number stands in the place of each, in the copies of model and loss or,
where functions read it, in the very variable (it behaves as the number does, so other threads may read it).
What the graph computes with them is compared with what it computes with constants
(:mod:`olla_fx.capture.symbols.comparison`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.refusals import DependsOnValuesError
from olla_fx.capture.types import OutputAlias, StepRequest
from olla_fx.errors import NumberNotLateError
from olla_fx.guards import LateBinding, NumberSlot, Role, StepInput
from olla_fx.guards.numbers import root_in
from olla_fx.torch_compat import DATA_DEPENDENT_ERRORS, LateNumbers, pytree


class LateTracing:
    """The late-bound numbers of one tracing run; does nothing if the request has none."""

    def __init__(self, request: StepRequest, model_copy: ModelCopy, fake_mode: Any) -> None:
        """Find the numbers in the copies that are traced.

        Args:
            request: what is traced.
            model_copy: the copies.
            fake_mode: of the arguments.
        """
        self._slots: tuple[NumberSlot, ...] = request.symbols.slots
        self._values = [slot.read() for slot in self._slots]
        self._fake_mode = fake_mode
        self._numbers = LateNumbers(fake_mode.shape_env)
        copies = {id(module): model_copy.modules[name] for name, module in request.modules().items()}
        self._roots = [
            root_in(slot.root, copies, request.loss_fn, model_copy.loss_fn) for slot in self._slots
        ]

    def add_inputs(self, inputs: list[StepInput], arguments: list[torch.Tensor]) -> None:
        """Add a placeholder for each number, and its argument."""
        for slot, value in zip(self._slots, self._values, strict=True):
            with self._fake_mode:
                dtype = torch.float64 if type(value) is float else torch.int64
                arguments.append(torch.empty((), dtype=dtype))
            inputs.append(StepInput(Role.NUMBER, slot.name, None, number=value))

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Trace within this; an error is one of the numbers'."""
        if not self._slots:
            yield
            return
        try:
            with self._numbers.traced():
                yield
        except DependsOnValuesError:
            raise
        except DATA_DEPENDENT_ERRORS:  # what is asked of inputs may have to be answered first
            raise
        except Exception as error:
            raise NumberNotLateError(self._pinned_names(), str(error)) from error

    @contextlib.contextmanager
    def in_place(
        self, inputs: Sequence[StepInput], flat: Sequence[torch.Tensor], arguments: Sequence[Any]
    ) -> Iterator[None]:
        """Let symbolic numbers stand in the places of the user's.

        Args:
            inputs: of the step.
            flat: its tensors.
            arguments: the fake tensors behind these.
        """
        if not self._slots:
            yield
            return
        indices = [index for index, item in enumerate(inputs) if item.role is Role.NUMBER]
        symbols: list[Any] = []
        for position, (index, value) in enumerate(zip(indices, self._values, strict=True)):
            self._numbers.put_into(arguments[index], self._numbers.new(position, value))
            symbols.append(flat[index].item())
        places = list(zip(self._slots, self._roots, symbols, self._values, strict=True))
        try:
            for slot, root, symbol, _ in places:
                slot.read(root)  # before it is replaced
                slot.write(symbol, root)
            yield
        finally:
            for slot, root, symbol, value in places:
                if slot.read(root) is symbol:  # else the step has assigned to it, which is refused
                    slot.write(value, root)

    def finish(self, graph_module: fx.GraphModule) -> None:
        """Refuse numbers that the graph holds for some values of only."""
        if not self._slots:
            return
        values = [
            leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))
        ]
        self._numbers.finish(values)
        if self._numbers.pinned:
            raise NumberNotLateError(self._pinned_names(), "its value decides a shape or an operator")

    def moved(self, alias: OutputAlias | None, tensors: int) -> OutputAlias | None:
        """Return the alias of an output as it is with the numbers before the inputs.

        Args:
            alias: as it is without numbers.
            tensors: how many placeholders come before the numbers.
        """
        if alias is None or alias.placeholder is None or alias.placeholder < tensors:
            return alias
        return replace(alias, placeholder=alias.placeholder + len(self._slots))

    def binding(self) -> LateBinding:
        """Return what is to be read and checked at every call."""
        types = tuple(type(value) for value in self._values)
        return LateBinding(self._slots, types, tuple(self._numbers.decisions))

    def _pinned_names(self) -> tuple[str, ...]:
        return tuple(self._slots[index].name for index in sorted(self._numbers.pinned))
