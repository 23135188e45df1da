"""Measures what a step's operators take, right after its recorded run.

Nothing of the run is used but its layouts: operators run on numbers of our own, when the memory of the run is
free again. What is learned serves the next plan of a step with such operators, in this process and in later
ones.
"""

from __future__ import annotations

from olla_fx import disk_cache
from olla_fx.costs import keep_measurements, measure_kinds, operator_seconds, read_measurements
from olla_fx.dataflow import Dataflow
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
