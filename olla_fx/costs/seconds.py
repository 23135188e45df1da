"""The seconds of a dataflow's operators: measured where their kinds were, else estimated.

An estimate is a roofline: a launch, and the longer of what an operator's floating-point operations and its
bytes take by the device's profile. Where some kinds were measured, the others' estimates are multiplied by
what the measured ones of the same operator took beside theirs, in sum, so that both are in one unit. (A
median would give a launch the weight of a product.) An operator of which no kind was measured takes the ratio
of all that compute as it does: products, or moving memory alone.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch

from olla_fx.costs.kinds import kind_of, operator_name
from olla_fx.costs.measurements import Measurements, read_measurements
from olla_fx.costs.profiles import DeviceProfile, profile_of
from olla_fx.costs.work import Work, work_of
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import is_marker
from olla_fx.link import is_transfer

_COPY = "clone"
_MUCH = 1 << 30

CAUTION = 30.0
"""A repetition of an operator of which nothing is known is taken to need so many times its estimate."""

MEASURED, ESTIMATED = "measured", "estimated"


@dataclass(frozen=True)
class Costs:
    """The seconds of a step's operators.

    Attributes:
        seconds: of each operator, in captured order; 0 for the markers of the caller's own loop, and for what
            begins or waits for copies beside the others.
        device: the name of the profile by which they were estimated.
        measured_share: share of the step's seconds that kernels were measured to take, 0 to 1.
        launch_seconds: of an operator that does nothing.
        byte_seconds: of reading or writing a byte more.
        again_seconds: what a repetition of each operator is to be taken for: more where that is not known.
    """

    seconds: tuple[float, ...]
    device: str
    measured_share: float = 0.0
    launch_seconds: float = 0.0
    byte_seconds: float = 0.0
    again_seconds: tuple[float, ...] = ()

    def moving_seconds(self, moved_bytes: int) -> float:
        """Return the seconds of an operator that only reads and writes so many bytes."""
        return self.launch_seconds + moved_bytes * self.byte_seconds

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
        return f"{self.measured_share:.0%} of the seconds measured here, the rest estimated for {self.device}"


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
    kinds = ["" if is_marker(node) or is_transfer(node) else kind_of(node) for node in dataflow.operators]
    by_kind[""] = 0.0
    unknown = set()
    for kind, node in zip(kinds, dataflow.operators, strict=True):
        if kind not in by_kind:
            name, work = operator_name(node), work_of(node, dataflow.device)
            by_kind[kind] = ratios.of(name, work) * chosen.seconds(name, work)
            if not (chosen.knows(name) or ratios.knows(name)):
                unknown.add(kind)
    seconds = tuple(by_kind[kind] for kind in kinds)
    measured_seconds = sum(by_kind[kind] for kind in kinds if kind in measurements)
    step_seconds = sum(seconds)
    launch, much = (_moving(chosen, ratios, moved_bytes) for moved_bytes in (0, _MUCH))
    return Costs(
        seconds,
        chosen.name,
        measured_seconds / step_seconds if step_seconds else 0.0,
        launch,
        (much - launch) / _MUCH,
        tuple(by_kind[kind] * (CAUTION if kind in unknown else 1.0) for kind in kinds),
    )


def _moving(profile: DeviceProfile, ratios: _Ratios, moved_bytes: int) -> float:
    """Return the seconds of a copy."""
    work = Work(0, torch.float32, moved_bytes)
    return ratios.of(_COPY, work) * profile.seconds(_COPY, work)


class _Ratios:
    """What operators take beside their estimates."""

    def __init__(self, measurements: Measurements, profile: DeviceProfile) -> None:
        measured: dict[object, float] = collections.defaultdict(float)
        estimated: dict[object, float] = collections.defaultdict(float)
        for kind in measurements.values():
            estimate = profile.seconds(kind.operator, kind.work)
            for group in (kind.operator, kind.work.flops > 0):
                measured[group] += kind.seconds
                estimated[group] += estimate
        self._ratios = {group: seconds / estimated[group] for group, seconds in measured.items()}

    def knows(self, operator: str) -> bool:
        """Return True if a kind of an operator was measured."""
        return operator in self._ratios

    def of(self, operator: str, work: Work) -> float:
        """Return by how much to multiply an estimate."""
        return self._ratios.get(operator) or self._ratios.get(work.flops > 0, 1.0)
