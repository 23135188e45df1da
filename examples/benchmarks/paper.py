"""Measures the evaluations of three papers again: tables, CSV files and plots.

OLLA's Figures 7 to 14 on its 18 models at batch 1 and 32, Figures 2 and 3 of "Profile-guided memory
optimization" (Sekiyama et al.), and Table I of SmartPool, each beside the paper's own averages.

    python examples/benchmarks/paper.py --device cuda                 # all of it, on a GPU
    python examples/benchmarks/paper.py --device cpu                  # traces, a model of the allocator
    python examples/benchmarks/paper.py --device cpu --quick          # a few small models, in minutes
    python examples/benchmarks/paper.py --figures 7 13 --models torchvision:resnet50 --batch-sizes 32

Every model is measured in a process of its own, so that one failure does not end the run, and its result is
kept as JSON in the output folder: a run that was stopped goes on where it was. The exit status is 1 if
something could not be measured; the tables name it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from paper_figures import olla, others, plots
from paper_figures.figure import Figure, csv_text, curves_csv, markdown
from paper_figures.jobs import FIGURES, OLLA, Job, jobs_of
from paper_figures.runner import apart, prepare, rows_of, run_all, stored

from olla_solvers.errors import OllaError
from olla_solvers.ilp import backends

ALL = {figure.key: figure for figure in (*olla.FIGURES, *others.FIGURES)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, then write tables, CSV files and plots."""
    options = _parser().parse_args(arguments)
    if options.one:
        return _measure_here(Job(**json.loads(options.one)))
    figures = options.figures or (OLLA if options.models else FIGURES)
    keys = list(dict.fromkeys(key if key in ALL else f"olla-{key}" for key in figures))
    output = options.output or Path("results", "paper-quick" if options.quick else "paper")
    try:
        backends.check_options(options.solver, options.time_limit)
        _check_device(options.device)
        jobs = _jobs(keys, options)
        prepare(output)
    except OllaError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    try:
        run_all(jobs, output, apart(Path(__file__), options.patience, options.threads))
    except KeyboardInterrupt:
        print("stopped; the same command goes on where this one was", file=sys.stderr)
        return 130
    write_figures([ALL[key] for key in keys], jobs, options.device, output)
    failed = [job for job in jobs if "error" in stored(job, output)]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} measured; see {output / options.device}")
    return 1 if failed else 0


def _jobs(keys: Sequence[str], options: argparse.Namespace) -> list[Job]:
    return jobs_of(
        keys,
        device=options.device,
        models=options.models,
        batches=options.batch_sizes,
        solver=options.solver,
        time_limit=options.time_limit,
        inductor=options.device == "cuda" if options.inductor is None else options.inductor,
        quick=options.quick,
    )


def write_figures(figures: Sequence[Figure], jobs: Sequence[Job], device: str, output: Path) -> None:
    """Write and print every figure's table; write its CSV file and its plot.

    Args:
        figures: what to write.
        jobs: those whose results are its rows.
        device: ``cpu`` or ``cuda``.
        output: the folder of results.
    """
    folder = output / device
    folder.mkdir(parents=True, exist_ok=True)
    if not plots.can_plot():
        print(f"no plots: matplotlib is not installed ({plots.INSTALL})", file=sys.stderr)
    tables = []
    for figure in figures:
        rows = rows_of(figure, jobs, output)
        tables.append(markdown(figure, rows, device))
        (folder / f"{figure.key}.md").write_text(tables[-1], encoding="utf-8")
        (folder / f"{figure.key}.csv").write_text(csv_text(figure, rows, device), encoding="utf-8")
        if figure.curve:
            points = curves_csv(figure, rows, device)
            (folder / f"{figure.key}-curve.csv").write_text(points, encoding="utf-8")
        if plots.can_plot():
            plots.plot(figure, rows, device, folder / f"{figure.key}.png")
    print("\n".join(tables))


def _measure_here(job: Job) -> int:
    """Measure one job in this process; print its result as the last line of output."""
    warnings.simplefilter("ignore")
    from paper_figures.measure import measure

    print(json.dumps(measure(job)))
    return 0


def _check_device(device: str) -> None:
    """Refuse CUDA where there is none.

    Raises:
        OllaError: saying what is missing.
    """
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None:
        raise OllaError(
            f"--device cuda: torch {torch.__version__} is built without CUDA; install one with it"
        )
    if not torch.cuda.is_available():
        raise OllaError("--device cuda: torch finds no CUDA device; is there one, and does the driver fit?")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [key.removeprefix("olla-") for key in FIGURES if key.startswith("olla-")]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of OLLA's figures; its own by default")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=_count, metavar="N", help="of OLLA's figures: 1 32"
    )  # fmt: skip
    parser.add_argument("--solver", choices=("auto", "none", *backends.SOLVERS), default="auto")
    parser.add_argument("--time-limit", type=float, metavar="S", help="for ordering and for placing, each")
    parser.add_argument(
        "--figures", nargs="+", choices=(*numbers, *FIGURES), metavar="FIGURE",
        help=f"some of {' '.join((*numbers, *FIGURES[len(numbers):]))}; default: all, OLLA's with --models",
    )  # fmt: skip
    parser.add_argument(
        "--inductor", action=argparse.BooleanOptionalAction,
        help="measure torch.compile, too; by default on a GPU only, as it compiles for minutes",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: results/paper")
    parser.add_argument("--quick", action="store_true", help="a few small models and batches")
    parser.add_argument("--patience", type=_seconds, default=1800.0, metavar="S", help="for each measurement")
    parser.add_argument("--threads", type=_count, metavar="N", help="of PyTorch's kernels on the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
