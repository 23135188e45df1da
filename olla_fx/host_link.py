"""The link between a device and its host, as users say it: ``"16GB/s"``, ``16e9``, a pair of these."""

from __future__ import annotations

import math
import re
from typing import Any

from olla_fx.byte_units import UNITS
from olla_solvers.errors import OptionError
from olla_solvers.swapping.transfers import Link

_BITS = re.compile(r"[KMGT]i?b")
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]+)\s*/\s*s\s*", re.IGNORECASE)


def link_of(given: Any) -> Link:
    """Read what a user gave.

    Args:
        given: bytes in a second, text with a unit (``"16GB/s"``), a pair of these (to the host, and back), or
            a link.

    Raises:
        OptionError: if it is none of these.
    """
    if isinstance(given, Link):
        return given
    directions = given if isinstance(given, tuple | list) else (given, given)
    if len(directions) != 2:
        raise _malformed(given)
    out, back = (_bytes_per_second(direction, given) for direction in directions)
    return Link(out, back)


def _bytes_per_second(direction: Any, given: object) -> float:
    is_number = isinstance(direction, int | float) and not isinstance(direction, bool)
    speed = float(direction) if is_number else 0.0
    if isinstance(direction, str):
        match = _TEXT.fullmatch(direction)
        # Links of networks are told in bits: a gigabit in a second is "Gb/s".
        if match is not None and not _BITS.fullmatch(match[2]):
            speed = float(match[1]) * UNITS.get(match[2].lower(), 0)
    if not 0 < speed < math.inf:
        raise _malformed(given)
    return speed


def _malformed(given: object) -> OptionError:
    return OptionError(
        "link is bytes in a second (16e9), text with a unit of bytes ('16GB/s'), or a pair of these, to the "
        f"host and back, not {given!r}"
    )
