"""Places every table of spans in some folders with every method, and tabulates what each reaches.

Every method of :data:`olla_solvers.placer.METHODS`, the integer programs with each solver that is installed;
omnimalloc's supermalloc where that is installed (``pip install 'olla-fx[benchmarks]'``), as it comes and
told the capacity with its three orderings side by side; and google/minimalloc where a ``minimalloc``
binary is on the PATH. All run one after another with one limit; ``taskset -c 0`` keeps them on one core.

    python examples/benchmarks/placement.py DIR --capacity minimalloc=1048576 --json placement.json
    python examples/benchmarks/placement.py DIR --capacity minimalloc=1048576 --methods auto omnimalloc-aimed
    python examples/benchmarks/placement.py DIR --capacity minimalloc=1048576 --methods auto --variants 3

``--variants N`` adds, for each table, N each of: ids shuffled, times stretched with jitter, times ranked and
reversed, sizes tripled (all of them shuffled besides). ``--generate N`` adds random tables of N spans.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import kept_figures

from olla_solvers.errors import NoSolutionError, OllaError, ProblemError
from olla_solvers.ilp import backends
from olla_solvers.place.search import compilation_seconds, is_available
from olla_solvers.placer import METHODS, place_with
from olla_solvers.plan import Span
from olla_solvers.spans import max_live_bytes
from olla_solvers.spans.table import read_spans

PROGRAMS = ("mip", "pyramid-mip")
"""Methods that need a solver."""

Outcome = tuple[int | None, bool]
"""The height, None where there is none, and whether it is proven that no other is lower."""


@dataclass
class Row:
    """The result of one method on one table.

    Attributes:
        table: its name.
        spans: how many it has.
        method: name.
        height: bytes, or None if nothing was found.
        bound: most bytes alive at once.
        goal: the height aimed at: the capacity, or the bound.
        seconds: wall-clock time.
        processor: seconds of processor time, those of other processes included.
        proven: whether the height is proven smallest, or at the bound.
        note: why there is no result.
    """

    table: str
    spans: int
    method: str
    height: int | None
    bound: int
    goal: int
    seconds: float
    processor: float
    proven: bool
    note: str = ""

    @property
    def is_solved(self) -> bool:
        """Return True if the goal is reached."""
        return self.height is not None and self.height <= self.goal


def tables(options: argparse.Namespace) -> Iterator[tuple[str, tuple[Span, ...], int]]:
    """Every table to place: its name, the spans, the goal."""
    for folder in options.folders:
        for path in sorted(Path(folder).glob("*.csv")):
            spans = read_spans(path)
            goal = _capacity(path.stem, options.capacity) or max_live_bytes(spans)
            yield path.stem, spans, goal
            for kind, vary in VARIANTS.items():
                for seed in range(1, options.variants + 1):
                    varied, factor = vary(spans, random.Random(f"{path.stem} {kind} {seed}"))
                    yield f"{path.stem} {kind} {seed}", varied, factor * goal
    for count in options.generate:
        for kind, generate in GENERATORS.items():
            spans = generate(count, random.Random(count))
            yield f"{kind} {count}", spans, max_live_bytes(spans)


def _capacity(name: str, given: Sequence[str]) -> int | None:
    """Return the capacity given for names that begin in some way."""
    for text in given:
        prefix, _, number = text.rpartition("=")
        if name.startswith(prefix):
            return int(number)
    return None


def _shuffled(spans: Sequence[Span], draw: random.Random) -> tuple[tuple[Span, ...], int]:
    mixed = list(spans)
    draw.shuffle(mixed)
    return tuple(replace(span, name=str(index)) for index, span in enumerate(mixed)), 1


def _times(spans: Sequence[Span]) -> list[int]:
    return sorted({time for span in spans for time in (span.lower, span.upper)})


def _stretched(spans: Sequence[Span], draw: random.Random) -> tuple[tuple[Span, ...], int]:
    later, now = {}, 0
    for time_before in _times(spans):
        now += draw.randint(1, 1000)
        later[time_before] = now
    mixed, _ = _shuffled(spans, draw)
    return tuple(replace(s, lower=later[s.lower], upper=later[s.upper]) for s in mixed), 1


def _reversed(spans: Sequence[Span], draw: random.Random) -> tuple[tuple[Span, ...], int]:
    rank = {moment: -index for index, moment in enumerate(_times(spans))}
    mixed, _ = _shuffled(spans, draw)
    return tuple(replace(s, lower=rank[s.upper], upper=rank[s.lower]) for s in mixed), 1


def _tripled(spans: Sequence[Span], draw: random.Random) -> tuple[tuple[Span, ...], int]:
    mixed, _ = _shuffled(spans, draw)
    return tuple(replace(span, size_bytes=3 * span.size_bytes) for span in mixed), 3


VARIANTS = {"shuffled": _shuffled, "stretched": _stretched, "reversed": _reversed, "tripled": _tripled}


def _uniform(count: int, draw: random.Random) -> tuple[Span, ...]:
    """Sizes of any kind, lifetimes of 200 on average."""
    made = []
    for number in range(count):
        lower = draw.randrange(count)
        upper = lower + 1 + int(draw.expovariate(1 / 200))
        made.append(Span(str(number), lower, upper, 64 * draw.randrange(1, 4096)))
    return tuple(made)


def _heavy(count: int, draw: random.Random) -> tuple[Span, ...]:
    """A few enormous sizes and lifetimes among many small ones."""
    made = []
    for number in range(count):
        lower = draw.randrange(count)
        upper = lower + 1 + int(draw.paretovariate(0.8)) % count
        made.append(Span(str(number), lower, upper, 64 * (1 + int(draw.lognormvariate(6, 2.5)))))
    return tuple(made)


def _step(count: int, draw: random.Random) -> tuple[Span, ...]:
    """A training step: activations that nest, gradients and workspaces that do not last."""
    layers = count // 4
    made = []
    for layer in range(layers):
        forward, backward = 3 * layer, 6 * layers - 3 * layer
        for kind, lower, upper, scale in (
            ("activation", forward, backward + draw.randrange(3), 8),
            ("scratch", forward, forward + 1 + draw.randrange(6), 9),
            ("gradient", backward - 1, backward + 2 + draw.randrange(6), 9),
            ("workspace", backward, backward + 1, 9),
        ):
            size = 64 * (1 + int(draw.lognormvariate(scale, 1.5)))
            made.append(Span(f"{kind} {layer}", lower, upper, size))
    return tuple(made)


GENERATORS = {"uniform": _uniform, "heavy": _heavy, "step": _step}


def methods(options: argparse.Namespace) -> dict[str, Callable[[Sequence[Span], int], Outcome]]:
    """Return the methods to run: from a name to a function of spans and goal."""
    limit = options.time_limit
    known: dict[str, Callable[[Sequence[Span], int], Outcome]] = {}
    for name in METHODS:
        solvers = backends.available_solvers() if name in PROGRAMS else ("none",)
        for solver in solvers:
            label = name if solver == "none" else f"{name} {solver}"
            known[label] = lambda spans, goal, name=name, solver=solver: _ours(
                spans, goal, name, solver, limit
            )
    with contextlib.suppress(ImportError):
        import omnimalloc  # noqa: F401

        known["omnimalloc"] = lambda spans, goal: _omnimalloc(spans, limit)
        known["omnimalloc-aimed"] = lambda spans, goal: _omnimalloc_aimed(spans, goal, limit)
    if shutil.which("minimalloc"):
        known["minimalloc"] = lambda spans, goal: _minimalloc(spans, goal, limit)
    chosen = options.methods
    return {
        label: run for label, run in known.items() if not chosen or {label, label.split()[0]} & set(chosen)
    }


def _ours(spans: Sequence[Span], goal: int, method: str, solver: str, limit: float) -> Outcome:
    bound = max_live_bytes(spans)
    # A capacity above the bound is what is aimed at; else as low as possible, which has a result at any rate.
    capacity = goal if goal > bound and method in ("auto", "search") else None
    placement = place_with(spans, method=method, solver=solver, time_limit=limit, capacity_bytes=capacity)
    return placement.height_bytes, placement.height_bytes == placement.lower_bound_bytes


def _allocations(spans: Sequence[Span]) -> list[object]:
    import omnimalloc

    if any(span.offset is not None or span.alignment > 1 for span in spans):
        raise ProblemError("takes neither given offsets nor alignments")
    return [
        omnimalloc.Allocation(id=index, size=span.size_bytes, start=span.lower, end=span.upper)
        for index, span in enumerate(spans)
    ]


def _omnimalloc(spans: Sequence[Span], limit: float) -> Outcome:
    import omnimalloc

    allocator = omnimalloc.allocators.SupermallocAllocator(timeout=limit, num_threads=1)
    placed = omnimalloc.allocate(_allocations(spans), allocator=allocator)
    height = max(allocation.offset + allocation.size for allocation in placed)
    return height, height == max_live_bytes(spans)


def _omnimalloc_aimed(spans: Sequence[Span], goal: int, limit: float) -> Outcome:
    """Run its search, which is private, told the height; one thread for each of its orderings."""
    from omnimalloc._cpp import Partition, try_solve_many
    from omnimalloc.allocators.supermalloc import DEFAULT_HEURISTICS

    whole = Partition.from_allocations(_allocations(spans))
    orders = [whole.reorder("".join(keys)).with_bound(goal + 1) for keys in DEFAULT_HEURISTICS]
    solution = try_solve_many(
        orders, goal + 1, None, canonical=True, dominance=True, floor_inference=True, monotonic_floor=True,
        decompose=True, timeout=limit, num_threads=len(orders),
    )  # fmt: skip
    return (None, False) if solution is None else (solution.peak, solution.peak == max_live_bytes(spans))


def _minimalloc(spans: Sequence[Span], goal: int, limit: float) -> Outcome:
    """The binary, by the flags and tables of its main.cc and converter.cc; its tables know no quotes."""
    if any(span.offset is not None for span in spans):
        raise ProblemError("takes no given offsets")
    numbered = [replace(span, name=str(index)) for index, span in enumerate(spans)]
    with tempfile.TemporaryDirectory() as folder:
        table, answer = Path(folder, "in.csv"), Path(folder, "out.csv")
        lines = [
            f"{span.name},{span.lower},{span.upper},{span.size_bytes},{span.alignment}" for span in numbered
        ]
        table.write_text("\n".join(["id,lower,upper,size,alignment", *lines]) + "\n", encoding="utf-8")
        command = ["minimalloc", f"--capacity={goal}", f"--input={table}", f"--output={answer}"]
        try:
            subprocess.run(
                [*command, f"--timeout={limit}s"], timeout=limit + 1, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return None, False
        if not answer.exists():
            return None, False
        placed = read_spans(answer)
    if {replace(span, offset=None) for span in placed} != set(numbered):
        raise ProblemError("placed other spans than it was given")
    height = max((span.offset or 0) + span.size_bytes for span in placed)
    return height, height == max_live_bytes(spans)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Run every method on every table."""
    chosen = methods(options)
    for name, spans, goal in tables(options):
        for label, run in chosen.items():
            start, processor = time.monotonic(), _processor_seconds()
            height, proven, note = None, False, ""
            try:
                height, proven = run(spans, goal)
            except NoSolutionError:
                note = "not found in time"
            except OllaError as error:
                note = str(error)[:160]
            seconds, spent = time.monotonic() - start, _processor_seconds() - processor
            yield Row(
                name, len(spans), label, height, max_live_bytes(spans), goal, seconds, spent, proven, note
            )


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="DIR", help="folders of tables, *.csv")
    parser.add_argument("--capacity", nargs="*", default=[], metavar="PREFIX=BYTES", help="goal by name")
    parser.add_argument("--methods", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="for each run")
    parser.add_argument("--variants", type=int, default=0, metavar="N", help="perturbed copies of each kind")
    parser.add_argument("--generate", type=int, nargs="*", default=[], metavar="N", help="spans at random")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if is_available():
        print(f"search ready after {compilation_seconds():.1f} s")
    rows = []
    print("| table | spans | method | height | height / bound | solved | proven | seconds | processor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in measure(options):
        rows.append(row)
        height = "-" if row.height is None else f"{row.height:,}"
        ratio = row.note or "-" if row.height is None else f"{row.height / row.bound:.5f}"
        print(
            f"| {row.table} | {row.spans:,} | {row.method} | {height} | {ratio} | "
            f"{'yes' if row.is_solved else 'no'} | {'yes' if row.proven else 'no'} | {row.seconds:.3f} | "
            f"{row.processor:.3f} |"
        )
        sys.stdout.flush()
    print("\n| method | solved | of | median seconds | largest | median processor | worst height / bound |")
    print("|---|---|---|---|---|---|---|")
    for label in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == label]
        seconds = [row.seconds for row in mine]
        worst = max((row.height / row.bound for row in mine if row.height is not None), default=float("nan"))
        print(
            f"| {label} | {sum(row.is_solved for row in mine)} | {len(mine)} | "
            f"{statistics.median(seconds):.3f} | {max(seconds):.3f} | "
            f"{statistics.median(row.processor for row in mine):.3f} | {worst:.4f} |"
        )
    kept_figures.keep(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
