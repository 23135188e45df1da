"""Times capture and passes beside the first step of ``torch.compile(backend="aot_eager")``, and whole plans.

    python examples/benchmarks/capture.py
    python examples/benchmarks/capture.py --rounds 5 --cases "GPT-2"
    python examples/benchmarks/capture.py --layers 4 8 16 32

Models of full depth and small width on little data: what is timed is tracing, not computing. For
``aot_eager`` that is the first forward and backward of the compiled model (Dynamo, AOTAutograd and the run
itself) and the optimizer's step in eager, for olla_fx the capture of the same whole step, update included,
and the passes. Each measurement is the processor time of one thread in a process of its own, in which both
have compiled a small model before, so that nothing is imported while it is timed; the two ways take turns.
With ``--layers`` olla_fx alone is timed, on Llamas of several depths, to see how the stages grow.

Two whole plans are made with ``olla_fx.plan()``: of ResNet-50 with SGD and of a Llama with 8 billion
parameters in bfloat16 with AdamW, both on the meta device. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ordering import table
from processes import run_apart
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.dataflow import build_dataflow
from olla_fx.models import CausalLanguageModel, ModelCase, build_model, import_torchvision, logits_loss
from olla_fx.passes import run_passes

MOST_OF_AOT_EAGER = 1.25
VOCABULARY = 96
SMALL = "torchvision:resnet18"
CASES = ("GPT-2", "Llama, 16 layers", "ResNet-152")
PLANS = {"ResNet-50": 5.0, "Llama, 8 billion": 60.0}
"""Whole plans, and the most processor seconds for each."""
WAYS = ("aot_eager", "olla_fx")


def language_model(kind: str, **sizes: int) -> nn.Module:
    """Build a language model of transformers."""
    import_torchvision()
    import transformers

    config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
    return CausalLanguageModel(transformers.AutoModelForCausalLM.from_config(config))


def llama(layers: int) -> nn.Module:
    """Build a narrow Llama."""
    return language_model(
        "llama", num_hidden_layers=layers, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip


def text_case(model: nn.Module, tokens: int = 16, batch: int = 2) -> ModelCase:
    """Return a language model with a text of random words."""
    words = torch.randint(VOCABULARY, (batch, tokens))
    return ModelCase(model.train(), (words, words), logits_loss)


def case_of(name: str) -> ModelCase:
    """Build a case by its name."""
    if name == "GPT-2":
        sizes = {"n_layer": 12, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY}
        return text_case(language_model("gpt2", **sizes))
    if name.startswith("Llama"):
        return text_case(llama(int(name.split()[1])))
    return build_model("torchvision:resnet152" if name == "ResNet-152" else name, batch_size=2, image_size=32)


def first_step(case: ModelCase) -> dict[str, float]:
    """Run the first step of a compiled model; return its processor seconds."""
    optimizer = torch.optim.AdamW(case.model.parameters())
    *inputs, target = case.inputs
    began = time.process_time()
    compiled = torch.compile(case.model, backend="aot_eager")
    loss_of(case)(compiled(*inputs), target).backward()
    optimizer.step()
    return {"seconds": time.process_time() - began}


def captured_step(case: ModelCase) -> dict[str, float]:
    """Capture a whole step and rewrite it; return the processor seconds of each stage."""
    optimizer = torch.optim.AdamW(case.model.parameters())
    began = time.process_time()
    captured = capture(StepRequest(case.model, case.inputs, Mode.TRAINING, loss_of(case), optimizer))
    traced = time.process_time()
    rewritten = run_passes(captured).graph_module
    passed = time.process_time()
    dataflow = build_dataflow(rewritten, captured.device)
    done = time.process_time()
    return {
        "capture": traced - began,
        "passes": passed - traced,
        "dataflow": done - passed,
        "seconds": passed - began,
        "operators": len(dataflow.operators),
    }


def loss_of(case: ModelCase) -> Callable[..., torch.Tensor]:
    """Return the loss of a training case."""
    if case.loss_fn is None:
        raise ValueError("a training case has a loss")
    return case.loss_fn


def whole_plan(name: str) -> dict[str, float]:
    """Plan a step on the meta device; return its processor seconds and figures."""
    optimizer: torch.optim.Optimizer
    if name == "ResNet-50":
        case = build_model("torchvision:resnet50", batch_size=32, device="meta")
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    else:
        with torch.device("meta"):
            model = language_model(
                "llama", num_hidden_layers=32, vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
                num_attention_heads=32, num_key_value_heads=8,
            ).bfloat16()  # fmt: skip
            case = text_case(model, tokens=2048, batch=1)
        optimizer = torch.optim.AdamW(case.model.parameters())
    began = time.process_time()
    plan = olla_fx.plan(case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer)
    seconds = time.process_time() - began
    return {"seconds": seconds, "operators": len(plan.order), "peak_bytes": plan.peak_bytes}


def measure(way: str, name: str) -> dict[str, float]:
    """Take one measurement in this process, once a small model was compiled in the same way."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measured = {"aot_eager": first_step, "olla_fx": captured_step}
    if way == "plan":
        captured_step(case_of(SMALL))
        return whole_plan(name)
    measured[way](case_of(SMALL))
    torch.compiler.reset()
    return measured[way](case_of(name))


def measure_apart(way: str, name: str) -> dict[str, Any]:
    """Take one measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", way, name]
    row = run_apart(command, environment={"OLLA_FX_CACHE_DIR": ""})
    if "error" in row:
        raise SystemExit(f"{name}, {way}: {row['error']}")
    return row


def compare(cases: Sequence[str], rounds: int) -> bool:
    """Print capture beside ``aot_eager``; return True if every ratio is small enough."""
    header = ("step with AdamW", "operators", "aot_eager", "capture", "passes", "dataflow", "ratio", "range")
    lines: list[tuple[str, ...]] = []
    worst = 0.0
    for name in cases:
        rows = [{way: measure_apart(way, name) for way in WAYS} for _ in range(rounds)]
        own, other = [row["olla_fx"] for row in rows], [row["aot_eager"] for row in rows]
        ratios = [row["olla_fx"]["seconds"] / row["aot_eager"]["seconds"] for row in rows]
        ratio = statistics.median(ratios)
        worst = max(worst, ratio)
        lines.append(
            (
                name,
                f"{own[0]['operators']:,}",
                _median(other, "seconds"),
                *(_median(own, stage) for stage in ("capture", "passes", "dataflow")),
                f"{ratio:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
        )
    print(table(header, lines))
    return worst <= MOST_OF_AOT_EAGER


def scale(layers: Sequence[int]) -> None:
    """Print how the stages grow with the depth of a Llama."""
    header = ("Llama with AdamW", "operators", "capture", "passes", "dataflow", "ms per operator")
    lines: list[tuple[str, ...]] = []
    for count in layers:
        row = measure_apart("olla_fx", f"Llama, {count} layers")
        stages = ("capture", "passes", "dataflow")
        per_operator = 1000 * sum(row[stage] for stage in stages) / row["operators"]
        seconds = (f"{row[stage]:.2f}" for stage in stages)
        lines.append((f"{count} layers", f"{row['operators']:,}", *seconds, f"{per_operator:.2f}"))
    print(table(header, lines))


def plan_all() -> bool:
    """Print the time of whole plans; return True if each is short enough."""
    lines: list[tuple[str, ...]] = []
    short = True
    for name, most in PLANS.items():
        row = measure_apart("plan", name)
        short = short and row["seconds"] <= most
        peak = f"{row['peak_bytes'] / (1 << 30):.2f}"
        lines.append((name, f"{row['operators']:,}", f"{row['seconds']:.1f}", f"{most:.0f}", peak))
    print(table(("plan()", "operators", "seconds", "at most", "peak, GiB"), lines))
    return short


def _median(rows: Sequence[dict[str, Any]], key: str) -> str:
    return f"{statistics.median(row[key] for row in rows):.2f}"


def main() -> int:
    """Measure what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", nargs="+", type=int, help="time Llamas of these depths instead")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return 0
    if arguments.layers:
        scale(arguments.layers)
        return 0
    is_fast = compare(arguments.cases, arguments.rounds) if arguments.cases else True
    return 0 if plan_all() and is_fast else 1


if __name__ == "__main__":
    raise SystemExit(main())
