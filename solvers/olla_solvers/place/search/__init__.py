"""The exact search: places spans within a capacity or proves that it cannot be done.

Depth first over canonical placements, after MiniMalloc (Moffitt, ASPLOS 2023), in sections of time, with a
portfolio of orders. :class:`~olla_solvers.place.search.rules.SearchRules` states every rule and proves it.
"""

from __future__ import annotations

from olla_solvers.place.search.driver import (
    INSTALL,
    SearchResult,
    SearchStatus,
    compilation_seconds,
    compilation_so_far,
    is_available,
    is_compiled,
    search,
)
from olla_solvers.place.search.rules import SearchRules

__all__ = [
    "INSTALL",
    "SearchResult",
    "SearchRules",
    "SearchStatus",
    "compilation_seconds",
    "compilation_so_far",
    "is_available",
    "is_compiled",
    "search",
]
