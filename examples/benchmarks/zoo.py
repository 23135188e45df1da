"""Trains every model it can build for two steps, eager and planned, and compares the two bit for bit.

The zoo: torchvision's classification, segmentation and video models on small images, and the architectures
of :mod:`zoo_architectures`. Each model gets a process and a time limit of its own, so that one failure ends
nothing. A model passes if losses, parameters, buffers, optimizer state and random numbers are equal to the
last bit, and its second step asked for nothing outside the planned buffer. A model that is refused is
trained once more as the callbacks for Trainer and Lightning do it, which leave it to eager, and compared in
the same way. The table says why a model did not pass.

    python examples/benchmarks/zoo.py --json zoo.json
    python examples/benchmarks/zoo.py --families transformers --names 'bert*' llama
    python examples/benchmarks/zoo.py --json zoo.json --resume --retry
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import fnmatch
import hashlib
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils import _pytree as pytree
from zoo_architectures import ARCHITECTURES
from zoo_transformers import MASKS, takes_mask, transformers_case

import olla_fx
from olla_fx.errors import OllaError
from olla_fx.integrations.in_place import PlannedCalls
from olla_fx.models import OPTIMIZERS, ModelCase, build_model, import_torchvision, optimizer_by_name
from olla_fx.options import Options

_MASKED = {f"transformers, mask {mask}": mask for mask in MASKS}
FAMILIES = ("classification", "segmentation", "video", "transformers", *_MASKED)
"""The first three are torchvision's; the last ones are texts with masks of ones, padded right and left."""

SEED = 0
BATCH = 2
STEPS = 2
LEARNING_RATE = 1e-3
IMAGE_SIZE = 64
IMAGE_SIZES = {
    "inception_v3": 299,  # its auxiliary classifier needs that much
    "maxvit_t": 224,  # cuts its feature maps into windows of 7
    "mvit_v1_b": 224,  # embeds positions of this size alone
    "mvit_v2_s": 224,
    "s3d": 224,  # pools over 7 by 7 at the end
    "vit_h_14": 56,  # cuts images into patches of 14
}
"""Sizes of models that cannot take images of :data:`IMAGE_SIZE`."""

PASS = "pass"
EAGER = "eager"
"""Refused by ``optimize``; left to eager by a callback, it trains as it does without olla_fx."""


@dataclass
class Row:
    """The outcome of one model.

    Attributes:
        name: of the model.
        family: one of :data:`FAMILIES`.
        status: :data:`PASS`, :data:`EAGER`, or in a word what went wrong.
        reason: why, for people; empty when it passed.
        parameters: how many numbers it learns.
        operators: of the planned step.
        static_bytes: of parameters, buffers, optimizer state and inputs.
        buffer_bytes: of the planned buffer.
        served: requests that the buffer served in the second step.
        outside: requests expected in the buffer that it did not serve.
        worker_requests: requests of kernels' own threads, which are never served.
        losses: of the steps.
        seconds: wall-clock time of all of it.
    """

    name: str
    family: str
    status: str = "error"
    reason: str = ""
    parameters: int = 0
    operators: int = 0
    static_bytes: int = 0
    buffer_bytes: int = 0
    served: int = 0
    outside: int = 0
    worker_requests: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the zoo; the exit status is 0 whatever models do."""
    options = _parser().parse_args(arguments)
    wanted = [
        (family, name)
        for family in options.families
        for name in _names(family)
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


def _names(family: str) -> list[str]:
    if family == "transformers":
        return list(ARCHITECTURES)
    if family in _MASKED:
        return [name for name in ARCHITECTURES if takes_mask(name)]
    models = import_torchvision().models
    module = {"classification": models, "segmentation": models.segmentation, "video": models.video}[family]
    return list(models.list_models(module=module))


def preload(families: Sequence[str]) -> None:
    """Import here, once, what every model's process would import by itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    modules = ["torch._dynamo", "torch._functorch.aot_autograd", "torch.utils.cpp_extension"]
    if {"transformers", *_MASKED}.intersection(families):
        import_torchvision()  # transformers imports it when it is there
        modules += ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
    for module in modules:
        importlib.import_module(module)


def build(family: str, name: str) -> ModelCase:
    """Build a model of the zoo in training mode, always with the same weights and inputs."""
    torch.manual_seed(SEED)
    if family == "transformers" or family in _MASKED:
        return transformers_case(name, _MASKED.get(family))
    size = IMAGE_SIZES.get(name, IMAGE_SIZE)
    return build_model(f"torchvision:{name}", batch_size=BATCH, image_size=size)


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


def _child(sending: Connection, stack: TextIO, family: str, name: str, options: argparse.Namespace) -> None:
    # Just before this process will be ended.
    faulthandler.dump_traceback_later(0.95 * options.time_limit, file=stack)
    warnings.simplefilter("ignore")
    if options.memory:
        limit = int(options.memory * (1 << 30))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    row = Row(name, family)
    try:
        try_model(row, options.optimizer, options.solver)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row.status = "error"
        row.reason = f"{type(error).__name__}: {_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
    sending.send(row)


def try_model(row: Row, optimizer: str, solver: str) -> None:
    """Train a model in eager and planned, and fill in what came of it."""
    try:
        expected = train_eager(row, optimizer)
    except Exception as error:
        row.status, row.reason = "eager fails", f"{type(error).__name__}: {_line(error)}"
        return
    try:
        given = train_planned(row, optimizer, solver)
    except OllaError as error:
        row.status, row.reason = "refused", f"{type(error).__name__}: {error}"
        calls = PlannedCalls(Options(solver=solver))
        different = difference(row, optimizer, expected, train_eager(row, optimizer, calls))
        if different is not None:
            row.reason += f" (left to eager: {': '.join(different)})"
        elif not calls.plans:
            row.status = EAGER
        return
    different = difference(row, optimizer, expected, given)
    if different is not None:
        row.status, row.reason = different
    elif not row.reason:
        row.status = PASS


def difference(
    row: Row, optimizer: str, expected: dict[str, str], given: dict[str, str]
) -> tuple[str, str] | None:
    """Return in a word and in a sentence how a training differs from eager; None if it does not."""
    different = [name for name in expected if expected[name] != given.get(name)]
    if expected.keys() == given.keys() and not different:
        return None
    again = train_eager(row, optimizer)
    unstable = [name for name in expected if expected[name] != again[name]]
    first = next(iter(unstable or different or expected.keys() ^ given.keys()))
    reason = f"{len(unstable or different)} of {len(expected)} differ, the first is {first}"
    return "eager not deterministic" if unstable else "differs", reason


def train_eager(row: Row, optimizer_name: str, calls: PlannedCalls | None = None) -> dict[str, str]:
    """Train in eager, or with calls planned as the callbacks do; return fingerprints of what it changes."""
    case = build(row.family, row.name)
    optimizer = optimizer_by_name(optimizer_name, case.model.parameters(), lr=LEARNING_RATE)
    if calls is not None:
        calls.add({"": case.model})
    prints = {}
    for index, (*inputs, target) in enumerate(_batches(case), 1):
        torch.manual_seed(SEED + index)
        optimizer.zero_grad()
        loss = case.loss_fn(case.model(*inputs), target)
        loss.backward()
        optimizer.step()
        prints[f"loss of step {index}"] = fingerprint(loss)
        del loss
    return prints | fingerprints(case, optimizer)


def train_planned(row: Row, optimizer_name: str, solver: str) -> dict[str, str]:
    """Train in planned steps; likewise, and put the counts of the last step into the row."""
    case = build(row.family, row.name)
    row.parameters = sum(parameter.numel() for parameter in case.model.parameters())
    optimizer = optimizer_by_name(optimizer_name, case.model.parameters(), lr=LEARNING_RATE)
    step = olla_fx.optimize(case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, solver=solver)
    prints = {}
    for index, batch in enumerate(_batches(case), 1):
        torch.manual_seed(SEED + index)
        step.poison()  # no step may depend on what the last one left in the buffer
        loss = step(*batch)
        prints[f"loss of step {index}"] = fingerprint(loss)
        row.losses.append(float(loss))
    counts, plan = step.stats.counts, step.plan
    row.operators = len(plan.problem.operators)
    row.static_bytes, row.buffer_bytes = plan.static_bytes, plan.buffer_bytes
    row.served, row.outside, row.worker_requests = (
        counts.served, counts.outside, counts.requests_on_worker_threads,
    )  # fmt: skip
    if step.stats.binding != "buffer":
        row.status, row.reason = "stock allocator", "no buffer was bound: is a C++ compiler there?"
    elif counts.outside or not counts.served:
        row.status = "outside the buffer"
        row.reason = f"{counts.outside} requests: {'; '.join(step.stats.outside_log[:3])}"
    elif step.stats.replans:
        row.status, row.reason = "planned again", "the second step did not fit the plan of the first"
    return prints | fingerprints(case, optimizer)


def _batches(case: ModelCase) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the example, and then the same with its examples in reverse order, but not their targets."""
    *inputs, target = case.inputs
    for index in range(STEPS):
        turned = [tensor.flip(0) if index % 2 else tensor.clone() for tensor in inputs]
        yield (*turned, target.clone())


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a digest that differs if a bit of the tensor does."""
    elements = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(elements.numpy().data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {digest}"


def fingerprints(case: ModelCase, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of all tensors that training changes, and of the random generator's state."""
    tensors: dict[str, torch.Tensor] = {"random numbers": torch.get_rng_state()}
    names = {}
    for name, parameter in case.model.named_parameters():
        tensors[f"parameter {name}"] = parameter
        names[parameter] = name
    tensors |= {f"buffer {name}": buffer for name, buffer in case.model.named_buffers()}
    for parameter, state in optimizer.state.items():
        for path, leaf in pytree.tree_flatten_with_path(state)[0]:
            if isinstance(leaf, torch.Tensor):
                tensors[f"state {names[parameter]}{pytree.keystr(path)}"] = leaf
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


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


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""


if __name__ == "__main__":
    sys.exit(main())
