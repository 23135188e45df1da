"""Builds a native library when it is first needed.

The library lies in torch's cache of extensions, in a folder named after everything it depends on: the
sources, torch, Python. So an existing library is up to date and is imported without a compiler, and two
versions of torch can share a cache.

Two processes may want to build at once, and one may die while it builds. torch's own lock is a file, which a
killed process leaves behind for others to wait on forever; the operating system's lock around it ends with
its holder, and its next holder removes the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from olla_fx import torch_compat

SOURCE_FOLDER = Path(__file__).parent / "csrc"
_ARENA_HEADERS = (
    "accumulation.h",
    "buffer.h",
    "cursor.h",
    "gradients.h",
    "module.h",
    "program.h",
    "recorder.h",
    "router.h",
    "support.h",
    "watchers.h",
)
# Hidden, or two libraries in one process would share symbols that each must have of its own.
_COMPILER_FLAGS = ("-O2", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class Library:
    """A library to build.

    Attributes:
        name: of the Python module, without its fingerprint.
        source: the file in ``csrc``.
        include_folders: folders of more headers.
        link_flags: for the linker.
        compiler_flags: beside those of all libraries.
        headers: the files in ``csrc`` that it includes.
    """

    name: str
    source: str
    include_folders: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    compiler_flags: tuple[str, ...] = ()
    headers: tuple[str, ...] = _ARENA_HEADERS


def load(library: Library) -> ModuleType:
    """Import a library; build it first if needed.

    Raises:
        ImportError, OSError, RuntimeError, subprocess.SubprocessError: if it cannot be built.
    """
    name = f"{library.name}_{_fingerprint(library)}"
    folder = _cache_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "olla_fx.lock"):
        path = folder / f"{name}.so"
        if path.exists():
            try:
                return _import(name, path)
            except ImportError:  # truncated by a crash, for instance: build it again
                path.unlink()
        (folder / "lock").unlink(missing_ok=True)
        return _compile(library, name, folder)


def _compile(library: Library, name: str, folder: Path) -> ModuleType:
    # The import takes a second, and an existing library does not need it.
    from torch.utils import cpp_extension

    with _scripts_on_path(), warnings.catch_warnings():
        # torch also warns of a missing compiler before it fails; one warning is enough.
        warnings.simplefilter("ignore")
        module: ModuleType = cpp_extension.load(
            name,
            [str(SOURCE_FOLDER / library.source)],
            extra_cflags=[*_COMPILER_FLAGS, *library.compiler_flags],
            extra_ldflags=list(library.link_flags),
            extra_include_paths=list(library.include_folders),
            build_directory=str(folder),
            verbose=False,
            with_cuda=False,  # without kernels no CUDA compiler is needed
        )
    return module


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Let torch find the ninja beside this Python even if its environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no library that Python can import")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fingerprint(library: Library) -> str:
    digest = hashlib.sha256()
    for name in (library.source, *library.headers):
        digest.update((SOURCE_FOLDER / name).read_bytes())
    environment = (torch.__version__, sys.implementation.cache_tag, platform.machine(), *_COMPILER_FLAGS)
    digest.update(repr((environment, library)).encode())
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return torch_compat.extensions_folder()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such lock on this system; torch's own still excludes other builders
        yield
        return
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
