"""Warns of releases of torch that are not tested."""

from __future__ import annotations

import warnings

import torch

OLDEST_TESTED = (2, 11)

NEWEST_TESTED = (2, 13)


def warn_if_newer_than_tested() -> None:
    """Warn once if this torch is newer than the newest that the tests ran with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"olla_fx is tested with torch up to {newest}, this is {torch.__version__}: "
            "please report what breaks",
            RuntimeWarning,
            stacklevel=3,
        )
