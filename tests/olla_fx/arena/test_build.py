"""Building the native module: without a compiler, twice at once, after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

SAY_WHETHER_AVAILABLE = """
import warnings
import torch
from olla_fx import ArenaUnavailableError, arena
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    availability = [arena.available() for _ in range(3)]
for warning in caught:
    print("WARNING", warning.category.__name__, warning.message)
print(availability, arena.build_seconds() is not None, arena.native_module() is not None)
if not availability[0]:
    with arena.interrupted():
        pass
    try:
        arena.Arena(arena.Buffer(0), 0, [])
    except ArenaUnavailableError as error:
        print("REFUSED", error)
"""


def start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "solvers"))),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-c", SAY_WHETHER_AVAILABLE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_without_a_compiler_there_is_one_warning_that_says_what_to_install(tmp_path: Path) -> None:
    lines = finish(start(tmp_path, CXX="/nowhere/c++", PATH=str(Path(sys.executable).parent)))
    warned, answer, refused = lines
    assert warned.startswith("WARNING RuntimeWarning olla_fx cannot build its CPU allocator")
    assert "Install a C++ compiler" in warned
    assert answer == "[False, False, False] False False"
    assert refused.startswith("REFUSED")


def test_the_arena_can_be_disabled(tmp_path: Path) -> None:
    answer, refused = finish(start(tmp_path, OLLA_FX_DISABLE_ARENA="1"))
    assert answer == "[False, False, False] False False"
    assert refused.startswith("REFUSED")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_build_at_once_and_a_library_needs_no_compiler(tmp_path: Path) -> None:
    expected = ["[True, True, True] True True"]
    builders = [start(tmp_path) for _ in range(2)]
    assert [finish(builder) for builder in builders] == [expected, expected]
    (library,) = tmp_path.glob("*/*.so")
    (library.parent / "lock").touch()  # what a builder that was killed leaves behind
    assert finish(start(tmp_path, CXX="/nowhere/c++")) == expected
    library.write_bytes(b"cut short")
    assert finish(start(tmp_path)) == expected
