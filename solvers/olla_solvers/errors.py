"""Every exception that the planners raise on purpose, under one base."""

from __future__ import annotations


class SolverError(Exception):
    """Base of all errors raised by ``olla_solvers``."""


class ProblemError(SolverError, ValueError):
    """A problem, plan or file that cannot be planned: says which item is wrong and why."""


class ValidationError(SolverError):
    """A plan breaks its problem: names the two arrays or operators concerned."""


class SolverUnavailableError(SolverError):
    """The named solver is unknown, not installed, or not licensed for a problem of this size."""


class InfeasibleError(SolverError):
    """Proven: no plan within the given limits exists."""


class NoSolutionError(SolverError):
    """No plan was found in the time allowed, and none was ruled out."""
