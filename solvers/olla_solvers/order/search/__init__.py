"""The exact ordering search: proves the smallest peak of graphs far too large for the integer program."""

from __future__ import annotations

from olla_solvers.order.search.alternate import Alternation
from olla_solvers.order.search.rules import ALL_RULES, SearchRules

__all__ = ["ALL_RULES", "Alternation", "SearchRules"]
