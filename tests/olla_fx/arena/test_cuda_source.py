"""The source of the CUDA allocator against the headers that are here, and where those are looked for."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from olla_fx.arena import Buffer, cuda_headers
from olla_fx.arena.build import SOURCE_FOLDER
from olla_fx.arena.cuda_headers import CudaHeadersError, headers_version, include_folders, library
from olla_fx.errors import ArenaUnavailableError

CUDA = torch.version.cuda or "13.0"
"""Taken for a torch that is built without CUDA: its headers are those of the builds with CUDA 13."""


def toolkit(root: Path, version: int, *, missing: str = "") -> Path:
    folder = root / "include"
    (folder / "crt").mkdir(parents=True)
    for name in ("cuda_runtime_api.h", "crt/host_config.h", "crt/host_defines.h"):
        (folder / name).touch()
    (folder / "cuda.h").write_text(f"#pragma once\n#define CUDA_VERSION {version}\n")
    if missing:
        (folder / missing).unlink()
    return folder


def alone(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Let one toolkit be all that there is."""
    monkeypatch.setattr(cuda_headers, "_candidates", lambda major: iter([home / "include"]))


def test_the_cuda_source_compiles() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    try:
        headers = include_folders(CUDA)
    except CudaHeadersError as error:
        pytest.skip(f"needs CUDA's headers: {error}")
    includes = [*cpp_extension.include_paths(), *map(str, headers), sysconfig.get_path("include")]
    command = [
        compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-DTORCH_EXTENSION_NAME=cuda_arena",
        # What only a torch that was built with CUDA has a header for.
        "-DC10_USING_CUSTOM_GENERATED_MACROS", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
        *(f"-isystem{folder}" for folder in includes), str(SOURCE_FOLDER / "cuda_arena.cpp"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("number", "version"), [(13000, "13.0"), (12080, "12.8"), (11070, "11.7")])
def test_headers_tell_their_version(tmp_path: Path, number: int, version: str) -> None:
    assert headers_version(toolkit(tmp_path, number)) == version


@pytest.mark.parametrize("missing", ["cuda.h", "cuda_runtime_api.h"])
def test_a_folder_without_all_headers_is_not_taken(tmp_path: Path, missing: str) -> None:
    assert headers_version(toolkit(tmp_path, 13000, missing=missing)) is None


def test_a_header_without_a_version_is_not_taken(tmp_path: Path) -> None:
    folder = toolkit(tmp_path, 13000)
    (folder / "cuda.h").write_text("// nothing\n")
    assert headers_version(folder) is None


def test_headers_of_the_same_first_number_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toolkit(tmp_path, 13020)
    alone(monkeypatch, tmp_path)
    assert include_folders("13.0") == (folder,)


def test_the_headers_of_the_dialect_may_be_another_cudas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = toolkit(tmp_path / "pip", 13000, missing="crt/host_config.h")
    whole = toolkit(tmp_path / "triton", 12080)
    monkeypatch.setattr(cuda_headers, "_candidates", lambda major: iter([runtime, whole]))
    assert include_folders("13.0") == (runtime, whole)
    assert include_folders("12.8") == (whole,)
    monkeypatch.setattr(cuda_headers, "_candidates", lambda major: iter([runtime]))
    with pytest.raises(CudaHeadersError, match=r"include \(incomplete\)"):
        include_folders("13.0")


def test_headers_of_another_cuda_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path, 12080)
    alone(monkeypatch, tmp_path)
    with pytest.raises(CudaHeadersError, match=r"built with CUDA 13\.0.*include \(CUDA 12\.8\)"):
        include_folders("13.0")


def test_the_users_own_toolkit_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toolkit(tmp_path, 13000)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert include_folders("13.0") == (folder,)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_has_no_cuda_allocator() -> None:
    with pytest.raises(CudaHeadersError, match="built without CUDA"):
        library()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_asked_for_and_absent_is_an_error_of_our_own() -> None:
    with (
        pytest.warns(RuntimeWarning, match="cannot build its CUDA allocator"),
        pytest.raises(ArenaUnavailableError, match="no native allocator for cuda"),
    ):
        Buffer(512, torch.device("cuda"))
