"""Warns of releases of torch that are not tested, and finds the folder of this installation's extensions."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import _appdirs

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


def extensions_folder() -> Path:
    """Return the folder of the user's compiled extensions, as ``cpp_extension.get_default_build_root()``.

    Importing ``torch.utils.cpp_extension`` to ask it loads setuptools: four megabytes to find a library that
    is there.
    """
    return Path(_appdirs.user_cache_dir(appname="torch_extensions")).resolve()  # type: ignore[no-untyped-call]
