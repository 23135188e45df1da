"""Measures what a step's operators take: right after its recorded run, and once in the buffer.

After the recorded run nothing of it is used but its layouts: operators run on numbers of our own, when the
memory of the run is free again. What is learned serves the next plan of a step with such operators, in this
process and in later ones.

With a memory budget a later run tells what the repetitions that were chosen do take. Its operators run one by
one, as when it was recorded, but in the buffer, which a run before has touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from olla_fx import disk_cache
from olla_fx.compiled import CompiledStep
from olla_fx.costs import keep_measurements, measure_kinds, operator_seconds, read_measurements
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import REPEATED
from olla_fx.link import is_transfer
from olla_fx.run.recording import OperatorRecord, StepRecord

SHARE_OF_RUN = 0.25
"""Of the recorded run's seconds, what measuring may take after it."""

ALWAYS_SECONDS = 0.1
"""What it may take in any case: enough for all operators of a small step."""

ENOUGH_MEASURED = 0.8
"""Share of the step's time from which on no more is measured: later starts plan with the same seconds."""

SHARE_OF_PEAK = 1 / 2
"""Of the plan's peak, what an operator's arguments and results may take at most to be measured: arguments of
one and results of another may be there at once."""


def can_be_timed(step: CompiledStep) -> bool:
    """Return True if a step repeats operators, and the clock tells what they take.

    Args:
        step: with a final plan.
    """
    return step.plan.recomputed.operators > 0 and step.captured.device.type == "cpu"


def extra_time_of(dataflow: Dataflow, order: Sequence[str], seconds: Mapping[int, float]) -> float | None:
    """Return what the repetitions of a run took, as a share of what all other operators took.

    What begins copies to the host and back, and waits for them, is not counted.

    Args:
        dataflow: the graph that ran.
        order: operators' names, by timestep.
        seconds: of each operator, by timestep.

    Returns:
        None if the other operators took no time that the clock can tell.
    """
    repeated = {node.name for node in dataflow.operators if node.meta.get(REPEATED)}
    copies = {node.name for node in dataflow.operators if is_transfer(node)}
    extra = others = 0.0
    for timestep, taken in seconds.items():
        name = order[timestep]
        extra += taken if name in repeated else 0.0
        others += 0.0 if name in repeated or name in copies else taken
    return extra / others if others > 0 else None


def measure_operators(dataflow: Dataflow, record: StepRecord, run_seconds: float, peak_bytes: int) -> None:
    """Measure operators that nobody has measured on this machine, and keep that on disk.

    Does nothing where nothing is kept.

    Args:
        dataflow: the graph that ran.
        record: what its operators requested.
        run_seconds: the time of the recorded run.
        peak_bytes: of the plan.
    """
    if disk_cache.cache_folder() is None:
        return
    known = read_measurements(dataflow.device)
    if operator_seconds(dataflow, measurements=known).measured_share >= ENOUGH_MEASURED:
        return
    measured = measure_kinds(
        dataflow,
        known,
        max(SHARE_OF_RUN * run_seconds, ALWAYS_SECONDS),
        {name: _requests(operator) for name, operator in record.operators.items()},
        int(SHARE_OF_PEAK * peak_bytes),
    )
    keep_measurements(dataflow.device, measured)


def _requests(record: OperatorRecord) -> list[tuple[int, int]]:
    arrays = [(ordinal, size_bytes) for ordinal, size_bytes, _ in record.arrays]
    return [*arrays, *((slot.ordinal, slot.size_bytes) for slot in record.workspace), *record.persistent]
