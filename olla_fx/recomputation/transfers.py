"""Translates what was planned to wait on the host beside repetitions to the graph in which these are.

A planner of both answers with executions, a sequence in which operators run again, and with transfers whose
timesteps are positions in it and whose arrays are those of the graph before, each with the repetition that
makes it. In the graph with the repetitions (:func:`~olla_fx.recomputation.problem.with_repetitions`) each of
them is an operator with arrays of its own, some operators do the work of two, and results may lie over
arguments. There the transfers are those of an ordinary step, for :func:`olla_fx.swapping.with_transfers`.

A repetition may read what the first run has made beside its result: the statistics of a batch norm. The
planner does not count that as an access, since who reads these later keeps them anyway; on the host they must
be back for it, so such an array comes back earlier than was planned, or stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from olla_fx.dataflow import Dataflow
from olla_fx.errors import SwapError
from olla_fx.fx_graph import storages_of
from olla_fx.recomputation.problem import RepeatedStep
from olla_solvers.problem import ArrayKind, Timestep
from olla_solvers.recomputation.problem import Execution
from olla_solvers.swapping.transfers import Transfer


def transfers_of_repeated(
    dataflow: Dataflow,
    executions: Sequence[Execution],
    repeated: RepeatedStep,
    transfers: Sequence[Transfer],
) -> tuple[Transfer, ...]:
    """Return transfers of the graph with repetitions, in the sequence that it tells (``repeated.order``).

    Args:
        dataflow: of the graph before, for which executions and transfers were planned.
        executions: the sequence.
        repeated: what became of them.
        transfers: in positions of the sequence.

    Raises:
        SwapError: if the graph has no such array.
    """
    timesteps = {name: timestep for timestep, name in enumerate(repeated.order)}
    placed = [None if name is None else timesteps.get(name) for name in repeated.runs]
    last, following = _last_known(placed), _last_known(placed[::-1])[::-1]
    arrays = _Arrays(dataflow, executions, repeated)

    def before(position: Timestep) -> Timestep:
        at = following[position] if position < len(following) else None
        return len(repeated.order) if at is None else at

    translated = []
    for transfer in transfers:
        out_after, array = last[transfer.out_after], arrays.of(transfer)
        if out_after is None:
            raise SwapError(f"the graph with repetitions has no operator up to the beginning of {transfer}")
        back_before = min(before(transfer.back_before), arrays.first_access(array, out_after))
        back_from = min(before(transfer.back_from), back_before)
        gone_before = min(before(transfer.gone_before), back_from - 1)
        if gone_before > out_after:
            translated.append(Transfer(out_after, gone_before, back_from, back_before, array))
    return tuple(translated)


def _last_known(values: Sequence[Timestep | None]) -> list[Timestep | None]:
    """Return for each place the last value up to it that is there."""
    known: list[Timestep | None] = []
    for value in values:
        known.append(known[-1] if value is None and known else value)
    return known


class _Arrays:
    """Finds the arrays of repetitions, and who reads them."""

    def __init__(self, dataflow: Dataflow, executions: Sequence[Execution], repeated: RepeatedStep) -> None:
        self._dataflow = dataflow
        self._problem = repeated.dataflow.problem
        self._timesteps = {name: timestep for timestep, name in enumerate(repeated.order)}
        self._nodes = {node.name: node for node in repeated.dataflow.operators}
        self._names = {
            (execution.operator, execution.copy): name
            for execution, name in zip(executions, repeated.runs, strict=True)
        }
        self._by_storage = {
            key: array
            for node, produced in zip(repeated.dataflow.operators, repeated.dataflow.produced, strict=True)
            for key, array in zip(storages_of(node.meta.get("val")), produced, strict=False)
            if key is not None and array is not None
        }

    def of(self, transfer: Transfer) -> int:
        """Return the array that a transfer means.

        Raises:
            SwapError: if there is none in the graph.
        """
        array = self._dataflow.problem.arrays[transfer.array]
        if array.producer is None or array.kind is not ArrayKind.PLANNED:
            raise SwapError(f"array {array.name} cannot wait on the host: no operator makes it")
        result = self._dataflow.produced[array.producer].index(transfer.array)
        name = self._names.get((array.producer, transfer.copy))
        storages = [] if name is None else storages_of(self._nodes[name].meta.get("val"))
        index = self._by_storage.get(storages[result] or 0) if result < len(storages) else None
        if index is None:
            raise SwapError(f"nothing makes copy {transfer.copy} of array {array.name}")
        return index

    def first_access(self, array: int, after: Timestep) -> Timestep:
        """Return the first timestep after another one at which an array is used; the end if there is none."""
        operators = self._problem.operators
        at = (self._timesteps[operators[reader].name] for reader in self._problem.arrays[array].consumers)
        return min((timestep for timestep in at if timestep > after), default=len(operators))
