"""The seconds of each operator of a dataflow, for what trades time for memory.

``work`` says how much an operator computes and moves, ``profiles`` how fast devices are, ``measuring`` times
operators on the machine at hand, ``measurements`` keeps what that showed, and ``seconds`` puts it together.
"""

from olla_fx.costs.measurements import Measurement, Measurements, keep_measurements, read_measurements
from olla_fx.costs.measuring import measure_kinds, usual_clock
from olla_fx.costs.profiles import PROFILES, DeviceProfile, profile_by_name, profile_of
from olla_fx.costs.seconds import Costs, operator_seconds
from olla_fx.costs.work import Work, work_of

__all__ = [
    "PROFILES",
    "Costs",
    "DeviceProfile",
    "Measurement",
    "Measurements",
    "Work",
    "keep_measurements",
    "measure_kinds",
    "operator_seconds",
    "profile_by_name",
    "profile_of",
    "read_measurements",
    "usual_clock",
    "work_of",
]
