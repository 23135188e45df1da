"""Lets arrays of a step wait on the host: candidate → candidate.

The step is planned as ever, with what it recomputes and writes over. Then, in the order that it has, somebody
chooses what waits on the host (:data:`olla_fx.swap_request.ChooseTransfers`), and
:mod:`olla_fx.passes.transfers` puts that into the graph, which keeps this order from here on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from olla_fx.costs import Costs, DeviceProfile, operator_seconds
from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.errors import SwapError
from olla_fx.fx_graph import source_of, storages_of
from olla_fx.passes.transfers import HostStay, put_in_transfers, why_not_swapped
from olla_fx.rewriting import Candidate, Rewriting
from olla_fx.swap_request import SwapProblem, SwapRequest
from olla_fx.swapped import Swapped, SwappedArray
from olla_solvers.problem import ArrayKind
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, Transfer, check


def swap(
    rewriting: Rewriting, candidate: Candidate, request: SwapRequest, profile: DeviceProfile | None = None
) -> Candidate:
    """Return a step some of whose arrays wait on the host.

    Args:
        rewriting: the step.
        candidate: its graph after everything else that changes it.
        request: over which link, and who chooses.
        profile: of a device that is not there, whose time counts; None for the one that the step is for.

    Returns:
        The candidate with transfers in its graph, in its order; as it was if nothing was chosen.

    Raises:
        SwapError: if a transfer was chosen that the step does not allow.
    """
    candidate = rewriting.ordered(candidate)
    if candidate.schedule is None:
        raise ValueError("the candidate was not ordered")
    costs = operator_seconds(candidate.dataflow, profile)
    stated = swap_problem(candidate.dataflow, candidate.schedule.order, costs, request.link)
    transfers = tuple(request.choose(stated))
    if not transfers:
        return candidate
    dataflow = rewriting.with_workspaces(with_transfers(candidate.dataflow, stated, transfers))
    swapped = replace(candidate, dataflow=dataflow, schedule=None)
    swapped = rewriting.ordered(swapped)
    told = _told(candidate.dataflow, stated, transfers, costs)
    saved_bytes = candidate.peak_bytes - swapped.peak_bytes
    return replace(swapped, swapped=replace(told, saved_bytes=saved_bytes))


def swap_problem(dataflow: Dataflow, order: Sequence[int], costs: Costs, link: Link) -> SwapProblem:
    """Say what of a step may wait on the host.

    Args:
        dataflow: of a graph after all passes.
        order: of its operators.
        costs: of these.
        link: which copies.
    """
    refused = why_not_swapped(dataflow.graph_module.graph)
    may_wait = frozenset(
        array
        for array, storage in _storages(dataflow).items()
        if storage not in refused
        and dataflow.problem.arrays[array].kind is ArrayKind.PLANNED
        and dataflow.storage_bytes[array]
    )
    return SwapProblem(dataflow.problem, tuple(order), costs.seconds, may_wait, link)


def with_transfers(dataflow: Dataflow, stated: SwapProblem, transfers: Sequence[Transfer]) -> Dataflow:
    """Put transfers into a step's graph.

    Args:
        dataflow: the step; not changed.
        stated: its operators in a sequence.
        transfers: within one step, in timesteps of this sequence.

    Raises:
        SwapError: if the step does not allow one of them.
    """
    check(transfers, len(stated.order))
    storages = _storages(dataflow)
    stays = []
    for transfer in transfers:
        if not 0 <= transfer.array < len(stated.problem.arrays):
            raise SwapError(f"the step has no array {transfer.array}")
        name = stated.problem.arrays[transfer.array].name
        if transfer.array not in stated.may_wait:
            raise SwapError(f"array {name} cannot wait on the host: {_reason(dataflow, transfer.array)}")
        if transfer.copy:
            raise SwapError(f"array {name} has no copies: what runs again is an operator of its own")
        if transfer.back_before >= len(stated.order):
            raise SwapError(f"array {name} cannot be on the host between two steps: it is gone after one")
        stays.append(
            HostStay(
                storages[transfer.array],
                transfer.out_after,
                transfer.gone_before,
                transfer.back_from,
                transfer.back_before,
            )
        )
    names = [dataflow.operators[index].name for index in stated.order]
    graph_module = put_in_transfers(dataflow.graph_module, names, stays)
    return build_dataflow(graph_module, dataflow.device, dataflow.gradients)


def _reason(dataflow: Dataflow, array: int) -> str:
    storage = _storages(dataflow).get(array)
    refused = why_not_swapped(dataflow.graph_module.graph)
    return refused.get(storage, "it is empty") if storage is not None else "no operator makes it"


def _storages(dataflow: Dataflow) -> dict[int, int]:
    """Return the storage of each array that an operator makes."""
    return {
        array: key
        for node, produced in zip(dataflow.operators, dataflow.produced, strict=True)
        for key, array in zip(storages_of(node.meta.get("val")), produced, strict=False)
        if key is not None and array is not None
    }


def _told(dataflow: Dataflow, stated: SwapProblem, transfers: Sequence[Transfer], costs: Costs) -> Swapped:
    """Return what is told of transfers."""
    arrays = [stated.problem.arrays[transfer.array] for transfer in transfers]
    sizes = [dataflow.storage_bytes[transfer.array] for transfer in transfers]
    seconds = [stated.seconds[index] for index in stated.order]
    return Swapped(
        tuple(
            SwappedArray(
                array.name,
                size_bytes,
                "" if array.producer is None else source_of(dataflow.operators[array.producer]),
            )
            for array, size_bytes in zip(arrays, sizes, strict=True)
        ),
        simulate(seconds, transfers, sizes, stated.link).stalled_seconds,
        sum(seconds),
        costs.told,
        stated.link.out_bytes_per_second,
        stated.link.in_bytes_per_second,
    )
