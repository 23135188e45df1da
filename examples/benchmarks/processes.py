"""Runs one measurement in a process of its own, so that its failure, crash or hanging ends nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any


def run_apart(
    command: Sequence[str],
    *,
    environment: Mapping[str, str | None] | None = None,
    time_limit: float | None = None,
) -> dict[str, Any]:
    """Run a command whose last line of output is a JSON object.

    Args:
        command: executable and arguments.
        environment: variables that differ from this process's; None for one that is not to be set.
        time_limit: seconds after which it is ended.

    Returns:
        The object; or what went wrong, for people, under ``error``.
    """
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            check=False,
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {time.perf_counter() - started:.0f} s"}
    if done.returncode < 0:
        return {"error": f"ended by signal {-done.returncode} (9 is usually a lack of memory)"}
    if done.returncode:
        words = done.stderr.strip().splitlines()
        return {"error": words[-1] if words else f"ended with status {done.returncode}"}
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": f"its last line of output is no JSON: {done.stdout[-200:]!r}"}
    return dict(result)
