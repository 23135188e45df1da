"""All errors that are raised on purpose can be caught as one, and as what Python would raise."""

import copy
import pickle

import pytest

import olla_fx
from olla_fx import arena, errors
from olla_solvers.errors import OllaError
from olla_solvers.infeasible.irreducible import CannotFitError


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_an_olla_error(name):
    assert issubclass(getattr(errors, name), OllaError)


def test_public_exceptions_are_among_them():
    public = {name: getattr(olla_fx, name) for name in olla_fx.__all__}
    raised = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    of_solvers = {"OptionError", "SolverUnavailableError"}
    assert (
        {"ArenaBusyError", "ArenaUnavailableError", "HostMemoryError", "SwapError"}
        <= raised
        <= {*errors.__all__, *of_solvers}
    )
    assert all(issubclass(public[name], OllaError) for name in raised)


@pytest.mark.parametrize("error", [olla_fx.ArenaBusyError, olla_fx.ArenaUnavailableError])
def test_errors_of_arenas_are_runtime_errors_too(error):
    assert issubclass(error, RuntimeError)


def test_a_busy_arena_is_caught_as_an_olla_error():
    busy = arena.Arena(arena.Buffer(64), 0, [])
    with busy.region(), pytest.raises(OllaError, match="already running a step"), busy.region():
        pass


@pytest.mark.parametrize(
    "error",
    [
        errors.BudgetError("no plan within 1 MiB", 5 << 20, is_proven=True),
        errors.MissingPackageError("lightning", "lightning", ImportError("no module")),
        errors.NumberNotLateError(("rate",), "it decides a shape", is_lasting=False),
        errors.NotPicklableError("a loss without a name"),
        CannotFitError("3 spans", ["one", "two"], is_irreducible=True, is_smallest=False),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_processes(error):
    """A pool of workers waits for ever for an error that cannot be unpickled."""
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
