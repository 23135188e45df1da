"""Runs jobs, each in a process of its own, keeps their results, and makes rows of them.

What is finished stays: a run that is stopped goes on where it was, and what failed is tried again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from processes import run_apart

from olla_solvers.errors import OptionError

from .figure import Figure, Row
from .jobs import Job, short

PARTS = {"eager": "expandable", "inductor": "inductor"}
"""Under which name a further baseline of a step stands in the step's row."""

Measure = Callable[[Job], dict[str, Any]]


def finished(job: Job, output: Path) -> dict[str, Any] | None:
    """Return an earlier result of this very job; None if there is none, or it failed.

    Args:
        job: the job.
        output: the folder of results.
    """
    path = job.path(output)
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    result = document.get("result", {})
    return result if document.get("job") == job.to_json() and "error" not in result else None


def run_all(jobs: Sequence[Job], output: Path, measure: Measure) -> None:
    """Run what is not finished, and keep every result as soon as it is there.

    Args:
        jobs: what to measure.
        output: the folder of results.
        measure: takes one measurement; a failure is under ``error`` in what it returns.
    """
    waiting = [job for job in jobs if finished(job, output) is None]
    for job in _with_progress(waiting, len(jobs) - len(waiting)):
        started = time.perf_counter()
        result = measure(job)
        _keep(job, output, {"seconds": time.perf_counter() - started, **result})


def apart(script: Path, time_limit: float, threads: int | None) -> Measure:
    """Return a function that measures a job in another process.

    Args:
        script: is called with ``--one`` and the job.
        time_limit: seconds for each.
        threads: of PyTorch's kernels; None for its own choice.
    """

    def measure(job: Job) -> dict[str, Any]:
        environment: dict[str, str | None] = {
            "OLLA_FX_CACHE_DIR": "",
            "PYTHONWARNINGS": "ignore",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        if job.device == "cuda":
            # Read when torch is imported; the second is its former name, which comes first where it is set.
            environment |= {"PYTORCH_ALLOC_CONF": job.allocator or None, "PYTORCH_CUDA_ALLOC_CONF": None}
        command = [sys.executable, str(script), "--one", json.dumps(job.to_json())]
        return run_apart(command, environment=environment, time_limit=time_limit)

    return measure


def _with_progress(jobs: Sequence[Job], done: int) -> Iterator[Job]:
    """Show a progress bar on standard error; without tqdm a line for each job."""
    try:
        from tqdm import tqdm
    except ImportError:
        for number, job in enumerate(jobs, 1):
            print(f"[{done + number}/{done + len(jobs)}] {job.kind} {job.name}", file=sys.stderr, flush=True)
            yield job
        return
    with tqdm(jobs, initial=done, total=done + len(jobs), unit="job", file=sys.stderr) as bar:
        for job in bar:
            bar.set_postfix_str(f"{job.kind} {job.name}")
            yield job


def _keep(job: Job, output: Path, result: dict[str, Any]) -> None:
    """Write a result in one move, so that a run that is killed leaves whole files."""
    path = job.path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"job": job.to_json(), "result": result}, indent=1), encoding="utf-8")
    unfinished.replace(path)


def rows_of(figure: Figure, jobs: Iterable[Job], output: Path) -> list[Row]:
    """Return the rows of a figure, in the sequence of the jobs.

    Args:
        figure: says which kinds of jobs are its rows.
        jobs: all that were asked for.
        output: the folder of results.
    """
    rows: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for job in jobs:
        result = stored(job, output)
        key = (job.model, job.group, job.train)
        if job.kind == figure.kind:
            rows[key] = {
                "model": short(job.model),
                "batch": job.batch,
                "group": job.group,
                "train": job.train,
                **result,
            }
        elif figure.kind == "step" and job.kind in PARTS and key in rows:
            name = PARTS[job.kind]
            if "needed" in result:
                rows[key][name] = result["needed"]
            else:
                rows[key].setdefault("error", f"{name}: {result['error']}")
    return list(rows.values())


def stored(job: Job, output: Path) -> dict[str, Any]:
    """Return a job's result, also of a failure."""
    path = job.path(output)
    if not path.exists():
        return {"error": "not run"}
    return dict(json.loads(path.read_text(encoding="utf-8"))["result"])


def prepare(output: Path) -> None:
    """Make the folder of results and see that it can be written to, before hours are spent on measuring.

    Raises:
        OptionError: if it cannot be written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise OptionError(f"--output {output}: cannot be written to ({error.strerror})") from error
