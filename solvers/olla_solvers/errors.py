"""Defines the exceptions that the planners raise, under one base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OllaError(Exception):
    """Base of all errors raised by ``olla_solvers`` and ``olla_fx``."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the error says and has; some are not made from their text alone."""
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[OllaError], arguments: tuple[object, ...], attributes: Mapping[str, object]
) -> OllaError:
    # Not kind.__new__, which of a MemoryError, too, is one that refuses.
    error = OllaError.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class ProblemError(OllaError, ValueError):
    """A problem, plan or file that cannot be planned: says which item is wrong and why."""


class OptionError(OllaError, ValueError):
    """An option whose value makes no sense."""


class ValidationError(OllaError):
    """A plan breaks its problem: names the two arrays or operators concerned."""


class SolverUnavailableError(OllaError):
    """The named solver is unknown, not installed, or not licensed for a problem of this size."""


class InfeasibleError(OllaError):
    """Proven: no plan within the given limits exists."""


class NoSolutionError(OllaError):
    """No plan was found in the time allowed, and none was ruled out."""
