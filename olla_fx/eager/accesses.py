"""Follows a program that is left as it is, and says which operators access which storages.

For programs that no capture turns into a graph, and that are no networks: a loop of k-means, say. What they
compute is not known, so nothing of it may run again; but an array may wait elsewhere between two accesses
(:mod:`olla_solvers.swapping`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from olla_fx.alignment import alignment_of, rounded
from olla_fx.errors import RecordingError
from olla_fx.torch_compat import TorchDispatchMode, pytree, schema_of
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.recomputation.problem import RecomputationProblem

Storage = int
"""The number of a storage, in the sequence in which the program first shows them."""


@dataclass(frozen=True, slots=True)
class RecordedOperator:
    """One operator that ran.

    Attributes:
        name: as ATen has it.
        reads: the storages that it reads or writes to, ascending.
        makes: the storages of its results that nobody had before, ascending.
        flops: of products and convolutions; 0 of others.
        dtype: of the first result with fractions, or of float32.
        moved_bytes: of all tensors that it is given and returns.
    """

    name: str
    reads: tuple[Storage, ...]
    makes: tuple[Storage, ...]
    flops: int
    dtype: torch.dtype
    moved_bytes: int


@dataclass(frozen=True)
class RecordedProgram:
    """What ran.

    Attributes:
        operators: in sequence; those that only make views are left out.
        sizes: bytes of each storage; those that no operator makes belong to the caller.
    """

    operators: tuple[RecordedOperator, ...]
    sizes: tuple[int, ...]

    def problem(self, seconds: Callable[[RecordedOperator], float]) -> RecomputationProblem:
        """Return the program as a step in the order that it has, of which nothing may run again.

        Args:
            seconds: of an operator.

        Raises:
            RecordingError: if nothing ran.
        """
        if not self.operators:
            raise RecordingError("no operator was recorded: run the program within the context of record()")
        alignment = alignment_of(torch.device("cpu"))
        producers = {made: index for index, item in enumerate(self.operators) for made in item.makes}
        readers: list[list[int]] = [[] for _ in self.sizes]
        for index, item in enumerate(self.operators):
            for read in item.reads:
                readers[read].append(index)
        arrays = tuple(
            Array(
                f"storage {storage}",
                rounded(size, alignment),
                producers.get(storage),
                tuple(readers[storage]),
                ArrayKind.PLANNED if storage in producers else ArrayKind.STATIC,
                alignment,
            )
            for storage, size in enumerate(self.sizes)
        )
        operators = tuple(Operator(f"{index} {item.name}") for index, item in enumerate(self.operators))
        count = len(operators)
        return RecomputationProblem(
            # Who writes over what others have read is not told apart: the sequence stays.
            Problem(operators, arrays, tuple((index, index + 1) for index in range(count - 1))),
            tuple(range(count)),
            tuple(map(seconds, self.operators)),
            ((),) * len(arrays),
            (0,) * count,
        )


class AccessTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of this thread, and the storages that each of them accesses."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[RecordedOperator] = []
        self._sizes: list[int] = []
        self._known: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}

    def program(self) -> RecordedProgram:
        """Return what ran so far."""
        return RecordedProgram(tuple(self._operators), tuple(self._sizes))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note it."""
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        reads = {self._number(tensor) for tensor in given}
        results = func(*args, **kwargs)
        returned = _tensors(results)
        makes = {self._number(tensor) for tensor in returned} - reads
        if makes or schema_of(func).is_mutable:
            everything = [*given, *returned]
            types_of = (tensor.dtype for tensor in (*returned, *given) if tensor.is_floating_point())
            formula = flop_registry.get(func.overloadpacket)
            self._operators.append(
                RecordedOperator(
                    func.overloadpacket.__name__,
                    tuple(sorted(reads)),
                    tuple(sorted(makes)),
                    int(formula(*args, **kwargs, out_val=results)) if formula else 0,
                    next(types_of, torch.float32),
                    sum(tensor.numel() * tensor.element_size() for tensor in everything),
                )
            )
        return results

    def _number(self, tensor: torch.Tensor) -> Storage:
        """Return the number of a tensor's storage, a new one if it is new."""
        storage = tensor.untyped_storage()
        identity = id(storage)
        if identity not in self._known:
            # The identity may be another storage's as soon as this one is gone.
            reference = weakref.ref(storage, lambda _: self._known.pop(identity, None))
            self._known[identity] = len(self._sizes), reference
            self._sizes.append(storage.nbytes())
        return self._known[identity][0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
