"""Finds the headers of CUDA that the CUDA allocator is compiled with.

A toolkit has them, and so have packages of pip's: the CUDA runtime's, which torch's own wheels for CUDA
depend on, with ``nvidia-cuda-crt`` beside it, and Triton's. Only headers of the CUDA that torch was built
with are taken: torch's own headers are written for them. The two of ``crt`` describe the
compiler's dialect and are the same in every version, so that Triton's complete the runtime's package.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from olla_fx.arena.build import Library

_VERSION_HEADER = "cuda.h"
# In a package of their own, which torch's wheels do not bring along.
_DIALECT_HEADERS = ("crt/host_config.h", "crt/host_defines.h")
_RUNTIME_HEADERS = (_VERSION_HEADER, "cuda_runtime_api.h")


class CudaHeadersError(RuntimeError):
    """There are no headers of CUDA here, or only those of another version."""


def library() -> Library:
    """Return the library of the CUDA allocator.

    Raises:
        CudaHeadersError: if torch has no CUDA, or its CUDA's headers are not found.
    """
    cuda_version = torch.version.cuda
    if cuda_version is None:
        raise CudaHeadersError(f"this torch ({torch.__version__}) was built without CUDA")
    torch_libraries = Path(torch.__file__).parent / "lib"
    return Library(
        "olla_fx_cuda_arena",
        "cuda_arena.cpp",
        tuple(map(str, include_folders(cuda_version))),
        (f"-L{torch_libraries}", "-lc10_cuda", "-ltorch_cuda"),
    )


def include_folders(cuda_version: str) -> tuple[Path, ...]:
    """Return the folder of a CUDA version's headers; two folders if none has all of them.

    Args:
        cuda_version: as in ``torch.version.cuda``; its first number must agree.

    Raises:
        CudaHeadersError: if there are none; names the folders that were searched, and their versions.
    """
    major = cuda_version.split(".")[0]
    candidates = list(_candidates(major))
    versions = [headers_version(folder) for folder in candidates]
    fitting = [
        folder
        for folder, version in zip(candidates, versions, strict=True)
        if version is not None and version.split(".")[0] == major
    ]
    complete = [folder for folder in candidates if _has(folder, _DIALECT_HEADERS)]
    for folder in fitting:
        if folder in complete:
            return (folder,)
    if fitting and complete:
        return fitting[0], complete[0]
    descriptions = [
        f"{folder} ({'incomplete' if version is None or folder in fitting else f'CUDA {version}'})"
        for folder, version in zip(candidates, versions, strict=True)
    ]
    raise CudaHeadersError(
        f"torch {torch.__version__} was built with CUDA {cuda_version}, and its headers are in none of: "
        + ", ".join(descriptions)
    )


def headers_version(folder: Path) -> str | None:
    """Return the version of the CUDA runtime's headers in a folder; None if one is missing."""
    if not _has(folder, _RUNTIME_HEADERS):
        return None
    text = (folder / _VERSION_HEADER).read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", text, re.MULTILINE)
    if match is None:
        return None
    number = int(match.group(1))
    return f"{number // 1000}.{number % 1000 // 10}"


def _has(folder: Path, headers: tuple[str, ...]) -> bool:
    return all((folder / header).is_file() for header in headers)


def _candidates(major: str) -> Iterator[Path]:
    """Yield the folders to search, the user's choice first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(root) / f"cu{major}" / "include"
        yield Path(root) / "cuda_runtime" / "include"
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(root) / "backends" / "nvidia" / "include"
    yield Path("/usr/local/cuda/include")
