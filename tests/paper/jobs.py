"""Jobs and tables of the script that measures the paper's figures."""

from __future__ import annotations

import csv
import io
from typing import Any

from paper_figures.jobs import FIGURES, Job, jobs_of


def make_job(model: str = "torchvision:alexnet", **changes: Any) -> Job:
    return Job(**{"kind": "step", "model": model, "batch": 1, "group": 1, "device": "cpu", **changes})


def all_jobs(**changes: Any) -> list[Job]:
    options: dict[str, Any] = {
        "device": "cpu", "models": None, "batches": None, "solver": "auto", "time_limit": None,
        "inductor": False, "quick": False,
    }  # fmt: skip
    return jobs_of(changes.pop("figures", FIGURES), **{**options, **changes})


def cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))
