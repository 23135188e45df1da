"""Trains every model it can build for a few steps, eager and planned, and compares the two bit for bit.

The models are those of :mod:`zoo_models`, and :mod:`zoo_training` trains them. Each gets a process and a time
limit of its own, so that one failure ends nothing. A model passes if losses, parameters, buffers, optimizer
state and random numbers are equal to the last bit, and its last step asked for nothing outside the planned
buffer, and for no more than the memory budget if there is one. A model that is refused is trained once more
as the callbacks for Trainer and Lightning do it, which leave it to eager, and compared in the same way. The
table says why a model did not pass.

    python examples/benchmarks/zoo.py --json zoo.json
    python examples/benchmarks/zoo.py --families transformers --names 'bert*' llama
    python examples/benchmarks/zoo.py --json zoo.json --resume --retry
    python examples/benchmarks/zoo.py --families classification --batch 12 --memory-budget 0.7
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import fnmatch
import importlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
from zoo_models import FAMILIES, MASKED, names_of
from zoo_training import PASS, Row, Training, first_line, try_model
from zoo_transformers import BATCH, MASKS

from olla_fx.models import OPTIMIZERS, import_torchvision


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the zoo; the exit status is 0 whatever models do."""
    options = _parser().parse_args(arguments)
    wanted = [
        (family, name)
        for family in options.families
        for name in names_of(family)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.names)
    ]
    if options.list:
        print("\n".join(f"{family}\t{name}" for family, name in wanted))
        return 0
    rows = _earlier_rows(options.json) if options.resume else {}
    torch.set_num_threads(options.threads)
    preload(options.families)
    for index, (family, name) in enumerate(wanted, 1):
        row = rows.get((family, name))
        if row is None or (options.retry and row.status != PASS):
            print(f"[{index}/{len(wanted)}] {family}:{name} ...", end="", file=sys.stderr, flush=True)
            row = rows[family, name] = in_its_own_process(family, name, options)
            print(f" {row.status}, {row.seconds:.0f} s {row.reason[:100]}", file=sys.stderr, flush=True)
            if options.json:
                _write(options.json, rows.values())
    print(table([rows[key] for key in wanted]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--names", nargs="+", default=["*"], metavar="PATTERN", help="such as 'resnet*'")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd-momentum")
    parser.add_argument("--solver", default="none", help="none: greedy orders and placements alone")
    traded = parser.add_mutually_exclusive_group()
    traded.add_argument("--recompute", type=float, metavar="SHARE", help="of a step's time")
    traded.add_argument(
        "--memory-budget", type=float, metavar="SHARE", help="of what a step needs without a budget"
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="how many examples a step sees")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for each model")
    parser.add_argument(
        "--memory", type=float, default=0.0, metavar="GIB", help="for each model; 0: no limit"
    )
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch's kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every model")
    parser.add_argument("--resume", action="store_true", help="skip what is in the file of --json")
    parser.add_argument("--retry", action="store_true", help="with --resume: but run again what did not pass")
    parser.add_argument("--list", action="store_true", help="name the models and run none")
    return parser


def preload(families: Sequence[str]) -> None:
    """Import here, once, what every model's process would import by itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    modules = ["torch._dynamo", "torch._functorch.aot_autograd", "torch.utils.cpp_extension"]
    if {"transformers", *MASKED}.intersection(families):
        import_torchvision()  # transformers imports it when it is there
        modules += ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
    for module in modules:
        importlib.import_module(module)


def in_its_own_process(family: str, name: str, options: argparse.Namespace) -> Row:
    """Try a model in a process of its own, which a crash or the time limit ends without ending this one."""
    started = time.perf_counter()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    # Forked, as importing torch and transformers takes longer than most models.
    context = multiprocessing.get_context("fork")
    stack = tempfile.TemporaryFile(mode="w+")
    process = context.Process(target=_child, args=(sending, stack, family, name, options))
    process.start()
    sending.close()
    row = Row(name, family)
    try:
        if receiving.poll(options.time_limit):
            row = receiving.recv()
        else:
            row.status = "timeout"
            row.reason = f"not done after {options.time_limit:g} s, at last in {_innermost(stack)}"
    except EOFError:
        process.join()
        row.status, row.reason = "crash", f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiving.close()
        stack.close()
    row.seconds = time.perf_counter() - started
    return row


def _innermost(stack: TextIO) -> str:
    """Return the function that a process was in when its stack was written."""
    stack.seek(0)
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack.read())
    return "{}:{}, {}".format(*frames[0]) if frames else "no Python code"


def _training(options: argparse.Namespace) -> Training:
    planning: dict[str, Any] = {"solver": options.solver}
    if options.recompute is not None:
        planning["recompute"] = options.recompute
    if options.memory_budget is not None:
        planning["memory_budget"] = options.memory_budget
    return Training(options.optimizer, getattr(torch, options.dtype), planning, options.batch)


def _child(sending: Connection, stack: TextIO, family: str, name: str, options: argparse.Namespace) -> None:
    # Just before this process will be ended.
    faulthandler.dump_traceback_later(0.95 * options.time_limit, file=stack)
    warnings.simplefilter("ignore")
    if options.memory:
        limit = int(options.memory * (1 << 30))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    row = Row(name, family)
    try:
        try_model(row, _training(options))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row.status = "error"
        row.reason = (
            f"{type(error).__name__}: {first_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
        )
    sending.send(row)


def table(rows: Sequence[Row]) -> str:
    """Format all models, and how many of each family pass, without masks and with them, in Markdown."""
    lines = ["| family | model | parameters | operators | buffer MiB | result |", "|---|---|---|---|---|---|"]
    for row in rows:
        result = row.status if row.status == PASS else f"**{row.status}**: {row.reason}".replace("|", "\\|")
        lines.append(
            f"| {row.family} | {row.name} | {row.parameters:,} | {row.operators:,} "
            f"| {row.buffer_bytes / 2**20:.1f} | {result} |"
        )
    masks = " | ".join(f"mask {mask}" for mask in MASKS)
    lines += ["", f"| family | models | pass | % | {masks} | others |", f"|{'---|' * (5 + len(MASKS))}"]
    by_family: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        by_family[row.family].append(row)
    for family in dict.fromkeys(family.partition(",")[0] for family in by_family):
        own = by_family[family]
        masked = [by_family[f"{family}, mask {mask}"] for mask in MASKS]
        counts = f"{len(own)} | {_passed(own)} | {100 * _passed(own) / max(1, len(own)):.1f}"
        columns = " | ".join(f"{_passed(of_mask)} of {len(of_mask)}" if of_mask else "" for of_mask in masked)
        others: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for row in itertools.chain(own, *masked):
            if row.status != PASS:
                others[row.status][row.name] = None
        named = "; ".join(f"{len(names)} {status}: {', '.join(names)}" for status, names in others.items())
        lines.append(f"| {family} | {counts} | {columns} | {named} |")
    return "\n".join(lines)


def _passed(rows: Sequence[Row]) -> int:
    return sum(row.status == PASS for row in rows)


def _earlier_rows(path: Path | None) -> dict[tuple[str, str], Row]:
    if path is None or not path.exists():
        return {}
    rows = [Row(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    return {(row.family, row.name): row for row in rows}


def _write(path: Path, rows: Any) -> None:
    """Write a file in one move, so that a run that is killed leaves a whole file."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
