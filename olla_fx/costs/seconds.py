"""The seconds of a dataflow's operators: measured where their kinds were, else estimated.

An estimate is a roofline: a launch, and the longer of what an operator's floating-point operations and its
bytes take by the device's profile. Where some kinds were measured, the others' estimates are multiplied by
what the measured ones of the same operator took beside theirs (the median), so that both are in one unit; an
operator of which no kind was measured takes the median of those that compute as it does: products, or moving
memory alone.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from olla_fx.costs.kinds import kind_of, operator_name
from olla_fx.costs.measurements import Measurements, read_measurements
from olla_fx.costs.profiles import DeviceProfile, profile_of
from olla_fx.costs.work import Work, work_of
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import is_marker

_Key = TypeVar("_Key")

MEASURED, ESTIMATED = "measured", "estimated"


@dataclass(frozen=True)
class Costs:
    """The seconds of a step's operators.

    Attributes:
        seconds: of each operator, in captured order; 0 for the markers of the caller's own loop.
        device: the name of the profile by which they were estimated.
        measured_share: share of the step's seconds that kernels were measured to take, 0 to 1.
    """

    seconds: tuple[float, ...]
    device: str
    measured_share: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds)

    @property
    def source(self) -> str:
        """``measured`` if most of the seconds are, else ``estimated``."""
        return MEASURED if self.measured_share > 1 / 2 else ESTIMATED

    @property
    def told(self) -> str:
        """Where the seconds come from, in words."""
        if not self.measured_share:
            return f"estimated for {self.device}"
        return f"{self.measured_share:.0%} of it measured here, the rest estimated for {self.device}"


def operator_seconds(
    dataflow: Dataflow, profile: DeviceProfile | None = None, measurements: Measurements | None = None
) -> Costs:
    """Return the seconds of each operator; runs nothing.

    Args:
        dataflow: the step.
        profile: of a device that is not there, of which nothing was measured; None for the one that the step
            is for.
        measurements: of that one; None for those on disk.
    """
    if profile is not None:
        measurements = {}
    elif measurements is None:
        measurements = read_measurements(dataflow.device)
    chosen = profile or profile_of(dataflow.device)
    ratios = _Ratios(measurements, chosen)
    by_kind = {kind: measured.seconds for kind, measured in measurements.items()}
    kinds = ["" if is_marker(node) else kind_of(node) for node in dataflow.operators]
    by_kind[""] = 0.0
    for kind, node in zip(kinds, dataflow.operators, strict=True):
        if kind not in by_kind:
            work = work_of(node, dataflow.device)
            by_kind[kind] = ratios.of(operator_name(node.target), work) * _estimate(work, chosen)
    seconds = tuple(by_kind[kind] for kind in kinds)
    measured_seconds = sum(by_kind[kind] for kind in kinds if kind in measurements)
    step_seconds = sum(seconds)
    return Costs(seconds, chosen.name, measured_seconds / step_seconds if step_seconds else 0.0)


def _estimate(work: Work, profile: DeviceProfile) -> float:
    return profile.seconds(work.flops, work.dtype, work.moved_bytes)


class _Ratios:
    """What operators take beside their estimates."""

    def __init__(self, measurements: Measurements, profile: DeviceProfile) -> None:
        by_operator: dict[str, list[float]] = collections.defaultdict(list)
        by_class: dict[bool, list[float]] = collections.defaultdict(list)
        for measured in measurements.values():
            ratio = measured.seconds / _estimate(measured.work, profile)
            by_operator[measured.operator].append(ratio)
            by_class[measured.work.flops > 0].append(ratio)
        self._of_operator = _medians(by_operator)
        self._of_class = _medians(by_class)

    def of(self, operator: str, work: Work) -> float:
        """Return by how much to multiply an estimate."""
        return self._of_operator.get(operator) or self._of_class.get(work.flops > 0, 1.0)


def _medians(ratios: Mapping[_Key, list[float]]) -> dict[_Key, float]:
    return {key: statistics.median(values) for key, values in ratios.items()}
