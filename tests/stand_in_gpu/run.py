"""Runs Python on a stand-in for a GPU: see README.md.

python tests/stand_in_gpu/run.py -m pytest tests/olla_fx/gpu/test_*routing.py
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
VARIABLE = "OLLA_FX_STAND_IN_GPU"


def main() -> int:
    """Build the libraries, and run what was asked for under them."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("there is no torch here")
    libraries = Path(spec.origin).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        sys.exit("this torch is built without CUDA")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = build(folder / "libstand_in.so", [HERE / "cuda_runtime.c", cublas(libraries, folder)])
        build(folder / "libcuda.so.1", [HERE / "cuda_driver.c"])
        paths = [str(REPOSITORY), str(REPOSITORY / "solvers"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            VARIABLE: "1",
            "LD_PRELOAD": str(runtime),
            "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.run([sys.executable, *sys.argv[1:]], env=environment, check=False).returncode


def cublas(libraries: Path, folder: Path) -> Path:
    """A source in which every function of cuBLAS that torch calls, and no other source has, succeeds."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", str(libraries / "libtorch_cuda.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    own = set(re.findall(r"\b(cublas\w+)\(", (HERE / "cuda_runtime.c").read_text()))
    names = sorted(set(re.findall(r" U (cublas\w+)", listing)) - own)
    source = folder / "cublas.c"
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in names))
    return source


def build(library: Path, sources: list[Path]) -> Path:
    """Compile sources into a shared library."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{home}/include", "-o", str(library)]
    subprocess.run([*command, *map(str, sources)], check=True)
    return library


if __name__ == "__main__":
    sys.exit(main())
