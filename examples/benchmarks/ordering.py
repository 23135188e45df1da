"""Orders training steps for the smallest peak and tabulates what every method reaches and proves.

Without arguments: the models of OLLA's evaluation at batch 1 and 32, captured under fake tensors, so that
no batch needs memory. With graph files: those. Three tables compare orders and bounds, the seconds of each
stage, and the sizes of the integer programs; ``--solvers`` adds a fourth, in which integer program solvers
get the same graphs and the same limit as the search, without its order or bound.

    python examples/benchmarks/ordering.py --graphs captured --json ordering.json
    python examples/benchmarks/ordering.py captured/alexnet_1_sgd.json --solvers cbc highs gurobi
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import kept_figures

from olla_solvers.analysis import peak_bytes
from olla_solvers.baselines.inductor import HEURISTICS
from olla_solvers.effort.patience import Patience
from olla_solvers.errors import OllaError
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.split import split
from olla_solvers.ilp import backends
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, LITERAL
from olla_solvers.order import order
from olla_solvers.order.bounds import MinimumCuts
from olla_solvers.order.greedy import best_order, free_first_orders
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.paper.program_size import program_size
from olla_solvers.problem import Problem

MODELS = (
    *(
        f"torchvision:{name}"
        for name in (
            "alexnet", "vgg11", "vgg16", "vgg19", "googlenet", "inception_v3", "resnet18", "resnet50",
            "r3d_18", "squeezenet1_0", "mobilenet_v2", "mnasnet0_5", "efficientnet_b0", "vit_b_16",
        )
    ),
    "torch:transformer-1",
    "torch:transformer",
    "transformers:roberta-base",
    "transformers:xlm-roberta-base",
)  # fmt: skip
"""The models that OLLA was evaluated on."""

SMALLEST_BATCH = {"torchvision:inception_v3": 2}
"""Batch sizes for models whose normalisation needs more than one value."""

TOKENS = 4
"""Length of the texts."""

MIB = 1 << 20


@dataclass
class Row:
    """The figures of a graph; bytes, and seconds of wall-clock time.

    Attributes:
        graph: its name.
        operators: how many it has.
        captured: peak of the captured order.
        eager: bytes that eager PyTorch needs, if it was followed.
        heuristics: peak of each heuristic's order.
        peak: peak of the best order.
        bounds: each bound.
        bound: the best bound.
        found_by: the method that found the order.
        proved_by: the one that proved it, or None.
        seconds: of each heuristic and bound by itself, and of ordering.
        stages: seconds of each stage of ordering that ran.
        programs: variables and constraints of the integer program, literal, within spans, and contracted.
        solvers: for each solver its peak, its own bound, status, seconds, and its program's size.
    """

    graph: str
    operators: int
    captured: int
    eager: int | None
    heuristics: dict[str, int]
    peak: int
    bounds: dict[str, int]
    bound: int
    found_by: str
    proved_by: str | None
    seconds: dict[str, float]
    stages: dict[str, float]
    programs: dict[str, tuple[int, int]]
    solvers: dict[str, dict[str, object]] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Share of the peak that is not proven to be needed."""
        return (self.peak - self.bound) / self.peak if self.peak else 0.0


def capture(name: str, batch: int, optimizer: str) -> tuple[Problem, int | None]:
    """Return a model's training step and the bytes that eager needs for it, under fake tensors."""
    import olla_fx
    from olla_fx.models import build_model, optimizer_by_name

    case = build_model(name, batch_size=batch, tokens=TOKENS, device="meta")
    plan = olla_fx.plan(
        case.model,
        case.inputs,
        loss_fn=case.loss_fn,
        optimizer=optimizer_by_name(optimizer, case.model.parameters()),
        solver="none",
        time_limit=0,
    )
    return plan.problem, None if plan.baseline is None else plan.baseline.live_peak_bytes


def graphs(options: argparse.Namespace) -> Iterator[tuple[str, Problem, int | None]]:
    """Yield every graph to measure: its name, the problem, and the bytes that eager needs."""
    for path in options.files:
        eager = path.with_suffix(".eager")
        needed = int(eager.read_text(encoding="utf-8")) if eager.exists() else None
        yield path.stem, Problem.load(path), needed
    if options.files:
        return
    for batch in options.batches:
        for model in options.models:
            size = max(batch, SMALLEST_BATCH.get(model, 1))
            name = f"{model.rpartition(':')[2]}_{size}_{options.optimizer}"
            try:
                yield name, *_captured_before(options.graphs, name, model, size, options.optimizer)
            except OllaError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)


def _captured_before(
    folder: Path | None, name: str, model: str, batch: int, optimizer: str
) -> tuple[Problem, int | None]:
    """Read a graph from the folder, or capture it and put it there."""
    if folder is None:
        return capture(model, batch, optimizer)
    graph, eager = folder / f"{name}.json", folder / f"{name}.eager"
    if not graph.exists():
        problem, needed = capture(model, batch, optimizer)
        folder.mkdir(parents=True, exist_ok=True)
        problem.save(graph)
        if needed is not None:
            eager.write_text(str(needed), encoding="utf-8")
    return Problem.load(graph), int(eager.read_text(encoding="utf-8")) if eager.exists() else None


def measure(name: str, problem: Problem, eager: int | None, time_limit: float) -> Row:
    """Order one graph by every method."""
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for label, heuristic in HEURISTICS.items():
        start = time.perf_counter()
        peaks[label] = peak_bytes(problem, heuristic(problem))
        seconds[label] = time.perf_counter() - start
    flow, _ = flow_of(problem)
    start = time.perf_counter()
    peaks["free first"] = min(candidate.peak_bytes for candidate in free_first_orders(flow))
    seconds["free first"] = time.perf_counter() - start
    start = time.perf_counter()
    peaks["greedy"] = best_order(flow, 0, float("inf")).peak_bytes
    seconds["greedy"] = time.perf_counter() - start
    bounds: dict[str, int] = {}
    start = time.perf_counter()
    bounds["precedence"] = max(flow_of(problem)[0].precedence_bytes, default=0)
    seconds["precedence"] = time.perf_counter() - start
    start = time.perf_counter()
    bounds["min-cut"] = _mincut_bytes(flow, time.monotonic() + 10)
    seconds["min-cut"] = time.perf_counter() - start
    schedule = order(problem, time_limit=time_limit)
    portfolio = Portfolio(flow_of(problem)[0], Patience.until(time.monotonic() + time_limit))
    portfolio.run()
    return Row(
        graph=name,
        operators=len(problem.operators),
        captured=peak_bytes(problem, problem.captured_order),
        eager=eager,
        heuristics=peaks,
        peak=schedule.peak_bytes,
        bounds=bounds,
        bound=schedule.lower_bound_bytes,
        found_by=schedule.found_by,
        proved_by=schedule.proved_by,
        seconds={**seconds, "order": schedule.seconds},
        stages=portfolio.seconds,
        programs=_program_sizes(flow),
    )


def _mincut_bytes(flow: FlowGraph, deadline: float) -> int:
    """Return the bound by minimum cuts at all operators of the contracted graph."""
    contracted = contract(flow)
    bound = max(contracted.floor_bytes, *flow.precedence_bytes, 0)
    for piece in split(contracted.flow):
        cuts = MinimumCuts(piece.flow, range(piece.flow.count), bound)
        cuts.run(deadline)
        bound = cuts.bound_bytes
    return bound


def _program_sizes(flow: FlowGraph) -> dict[str, tuple[int, int]]:
    """Return sizes of equation 14: literal; within spans; contracted and split."""
    pieces = [program_size(piece.flow) for piece in split(contract(flow).flow)]
    sizes = {"literal": program_size(flow, LITERAL), "within spans": program_size(flow, ALL_TECHNIQUES)}
    return {
        **{name: (size.variables, size.constraints) for name, size in sizes.items()},
        "contracted": (sum(size.variables for size in pieces), sum(size.constraints for size in pieces)),
    }


def compare_solvers(row: Row, problem: Problem, solvers: Sequence[str], time_limit: float) -> None:
    """Give each solver the graph; what it cannot take is noted in its own words."""
    for solver in ("auto", *solvers):
        try:
            schedule = order(problem, solver=solver, time_limit=time_limit)
        except OllaError as error:
            row.solvers[solver] = {"status": str(error)}
            continue
        report = schedule.solver
        named = solver != "auto"
        row.solvers[solver] = {
            "peak": schedule.peak_bytes,
            "bound": report.bound_bytes if named else schedule.lower_bound_bytes,
            "status": report.status.value if named else schedule.proved_by or "open",
            "seconds": schedule.seconds,
            "variables": report.variables,
            "constraints": report.constraints,
        }


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return columns of text, the first aligned to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            f"{cell:<{widths[0]}}" if not column else f"{cell:>{widths[column]}}"
            for column, cell in enumerate(line)
        )
        for line in (header, *lines)
    )


def orders_table(rows: Sequence[Row]) -> str:
    """Return the first table; peaks and bounds in MiB."""
    header = ("graph", "operators", "eager", "captured", *HEURISTICS, "free first", "greedy", "peak",
              "precedence", "min-cut", "gap %", "seconds", "found by", "proved by")  # fmt: skip
    lines = [
        (
            row.graph,
            f"{row.operators:,}",
            _mib(row.eager),
            _mib(row.captured),
            *(_mib(peak) for peak in row.heuristics.values()),
            _mib(row.peak),
            *(_mib(bound) for bound in row.bounds.values()),
            f"{100 * row.gap:.3f}",
            f"{row.seconds['order']:.2f}",
            row.found_by,
            row.proved_by or "open",
        )
        for row in rows
    ]
    return table(header, lines)


def stages_table(rows: Sequence[Row]) -> str:
    """Return the second table: seconds of each stage that ran."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.stages))
    lines = [
        (row.graph, *(f"{row.stages[stage]:.3f}" if stage in row.stages else "-" for stage in stages))
        for row in rows
    ]
    return table(("graph", *stages), lines)


def programs_table(rows: Sequence[Row]) -> str:
    """Return the third table: variables and constraints."""
    names = list(rows[0].programs) if rows else []
    header = ("graph", *(f"{name}: {what}" for name in names for what in ("variables", "constraints")))
    lines = [(row.graph, *(f"{size:,}" for name in names for size in row.programs[name])) for row in rows]
    return table(header, lines)


def solvers_table(rows: Sequence[Row]) -> str:
    """Return the last table; peaks and bounds in MiB."""
    lines = [
        (
            row.graph,
            solver,
            *(
                _mib(figure if isinstance(figure := result.get(key), int) else None)
                for key in ("peak", "bound")
            ),
            f"{result['seconds']:.2f}" if "seconds" in result else "-",
            *(str(result.get(key, "-")) for key in ("variables", "constraints")),
            str(result["status"])[:70],
        )
        for row in rows
        for solver, result in row.solvers.items()
    ]
    return table(
        ("graph", "solver", "peak", "own bound", "seconds", "variables", "constraints", "status"), lines
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.2f}"


def main() -> int:
    """Run the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="graph files to order instead of models")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names as olla-fx plan takes them")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 32))
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a graph")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs for the next run")
    parser.add_argument("--solvers", nargs="+", default=(), choices=backends.SOLVERS)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    rows = []
    for name, problem, eager in graphs(options):
        row = measure(name, problem, eager, options.time_limit)
        if options.solvers:
            compare_solvers(row, problem, options.solvers, options.time_limit)
        rows.append(row)
        print(f"{name}: {_mib(row.peak)} MiB, {row.proved_by or 'open'}", file=sys.stderr)
        kept_figures.keep(options.json, [asdict(row) for row in rows])
    tables = [orders_table, stages_table, programs_table, *([solvers_table] if options.solvers else [])]
    print("\n\n".join(make(rows) for make in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
