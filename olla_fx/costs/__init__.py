"""The seconds of each operator of a dataflow.

Nothing runs here: an operator takes a launch, and the longer of what its floating-point operations and its
bytes take by the device's profile (a roofline).
"""

from __future__ import annotations

from dataclasses import dataclass

from olla_fx.costs.profiles import PROFILES, DeviceProfile, profile_by_name, profile_of
from olla_fx.costs.work import MARKERS, Work, work_of
from olla_fx.dataflow import Dataflow

__all__ = [
    "PROFILES",
    "Costs",
    "DeviceProfile",
    "Work",
    "operator_seconds",
    "profile_by_name",
    "profile_of",
    "work_of",
]

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


def operator_seconds(dataflow: Dataflow, profile: DeviceProfile | None = None) -> Costs:
    """Return the seconds of each operator; runs nothing.

    Args:
        dataflow: the step.
        profile: of a device that is not there; None for the one that the step is for.
    """
    chosen = profile or profile_of(dataflow.device)
    works = [work_of(node, dataflow.device) for node in dataflow.operators]
    seconds = [chosen.seconds(work.flops, work.dtype, work.moved_bytes) for work in works]
    pairs = zip(dataflow.operators, seconds, strict=True)
    return Costs(tuple(0.0 if node.target in MARKERS else taken for node, taken in pairs), chosen.name)
