"""Defines the exceptions that the planners raise, under one base."""

from __future__ import annotations


class OllaError(Exception):
    """Base of all errors raised by ``olla_solvers`` and ``olla_fx``."""


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
