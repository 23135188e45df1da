"""All errors that are raised on purpose can be caught as one, and as what Python would raise."""

import pytest

import olla_fx
from olla_fx import arena, errors
from olla_solvers.errors import OllaError


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
