"""The memory that a step may need, as users say it: ``8 << 30``, ``"8GiB"``, ``0.6``, ``"60%"``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from olla_fx.byte_units import UNITS
from olla_solvers.errors import OptionError

_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A limit in bytes, or as a share of what the step needs without a limit.

    Attributes:
        size_bytes: the limit; None if it is a share.
        share: in (0, 1], of what the step needs without a limit; None if the limit is in bytes.
        least_bytes: a share is not less than that.
    """

    size_bytes: int | None = None
    share: float | None = None
    least_bytes: int = 0

    @classmethod
    def of(cls, given: Any) -> MemoryBudget:
        """Read what a user gave.

        Args:
            given: bytes (a whole number), text with a unit (``"8GiB"``, ``"500 MB"``), or a share (a float up
                to 1, or ``"60%"``). Text without a unit is the number that it says.

        Raises:
            OptionError: if it is none of these, or not above 0.
        """
        if isinstance(given, str):
            return _of_text(given)
        if isinstance(given, float) and 0 < given <= 1:
            return cls(share=given)
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if is_number and given > 0 and given == given // 1:
            return cls(size_bytes=int(given))
        raise _malformed(given)

    def in_bytes(self, needed_bytes: int) -> int:
        """Return the limit in bytes.

        Args:
            needed_bytes: what the step needs without a limit.
        """
        if self.size_bytes is not None:
            return self.size_bytes
        return max(self.least_bytes, math.floor((1.0 if self.share is None else self.share) * needed_bytes))


def _of_text(text: str) -> MemoryBudget:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _malformed(text)
    number, unit = float(match[1]), match[2].lower()
    if not unit:
        return MemoryBudget.of(int(match[1]) if match[1].isdecimal() else number)
    if unit == "%" and 0 < number <= 100:
        return MemoryBudget(share=number / 100)
    size = number * UNITS.get(unit, 0)
    if not 1 <= size < math.inf:
        raise _malformed(text)
    return MemoryBudget(size_bytes=math.floor(size))


def _malformed(given: object) -> OptionError:
    return OptionError(
        "memory_budget is bytes above 0 (8 << 30), text with a unit ('8GiB', '500MB'), or a share of what "
        f"the step needs without a budget (0.6, '60%'), not {given!r}"
    )
