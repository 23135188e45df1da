"""Makes the steps of the benchmark of swapping: SmartPool's networks, with the seconds of a device.

The networks are those of ``paper_figures/models/cifar.py`` at batch 100, trained by SGD with momentum and
weight decay, in the order in which eager runs them. Of torch.ch's ResNets the variant that keeps the
resolution in its stem comes nearest to the loads of the paper's Table I.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from budget_steps import planned_step
from paper_figures.jobs import SMARTPOOL_BATCH, SMARTPOOL_MODELS

from olla_fx.capture import CapturedStep, Mode, Role, StepRequest, capture
from olla_fx.costs import PROFILES, operator_seconds, profile_by_name
from olla_fx.dataflow import Dataflow, GradientsInBuffer, build_dataflow
from olla_fx.models import build_model
from olla_fx.options import Options
from olla_fx.passes import run_passes
from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.swapping.timed_step import TimedStep

MODELS = SMARTPOOL_MODELS

CIFAR = Path(__file__).parent / "paper_figures" / "models" / "cifar.py"

GTX_1080_TI = replace(profile_by_name("gtx1080ti"), name="gtx-1080-ti")
"""The paper's GPU, as it is called in the file of figures."""

ITERATION_MS = {
    "resnet18": 359 / 1.83, "resnet34": 684 / 1.85, "resnet50": 993 / 1.88, "resnet101": 2086 / 1.97,
    "vgg11": 76 / 1.75, "vgg13": 94 / 1.71, "vgg16": 122 / 1.73, "vgg19": 162 / 1.94,
}  # fmt: skip
"""Milliseconds of an iteration with SmartPool by the paper's Table I: cudaMalloc's time over the speedup."""

AS_MEASURED = "as-measured"

DEVICES = (GTX_1080_TI.name, AS_MEASURED, "a100")
"""The paper's GPU estimated; the same, all estimates stretched to the paper's iteration; and a newer one."""

OPTIONS = Options(rewrites="none")
"""The paper's steps are not rewritten."""


@dataclass(frozen=True)
class CapturedNetwork:
    """A network's training step.

    Attributes:
        name: of the network.
        captured: its functional graph.
        dataflow: its operators in eager's order, and arrays.
        renewed: the arrays of its examples.
    """

    name: str
    captured: CapturedStep
    dataflow: Dataflow
    renewed: frozenset[int]

    def on(self, device: str) -> TimedStep:
        """Return the step with the seconds of a device.

        Args:
            device: one of :data:`DEVICES`.
        """
        seconds = operator_seconds(self.dataflow, PROFILES.get(device, GTX_1080_TI)).seconds
        problem = self.dataflow.problem
        return TimedStep(problem, problem.captured_order, self._stretched(seconds, device), self.renewed)

    def orders_on(self, device: str) -> tuple[RecomputationProblem, ...]:
        """Return the step with what of it may run again, in this project's orders and in eager's.

        All that the caller owns may wait on the host.

        Args:
            device: one of :data:`DEVICES`, whose seconds the step has.
        """
        step = planned_step(self.captured, PROFILES.get(device, GTX_1080_TI), OPTIONS)
        eager = replace(step.problems[0], order=step.problems[0].problem.captured_order)
        arrays = enumerate(eager.problem.arrays)
        lent = frozenset(index for index, array in arrays if array.kind is ArrayKind.STATIC)
        return tuple(
            replace(
                problem,
                seconds=self._stretched(problem.seconds, device),
                lent=lent,
                renewed=self.renewed,
            )
            for problem in (*step.problems, eager)
        )

    def _stretched(self, seconds: tuple[float, ...], device: str) -> tuple[float, ...]:
        if device != AS_MEASURED:
            return seconds
        stretch = ITERATION_MS[self.name] / 1000 / sum(seconds)
        return tuple(stretch * duration for duration in seconds)


def captured_network(name: str) -> CapturedNetwork:
    """Capture a network's training step, without rewrites or another order.

    Args:
        name: one of :data:`MODELS`.
    """
    case = build_model(f"{CIFAR}:{name}", batch_size=SMARTPOOL_BATCH, device="meta")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    request = StepRequest(case.model, case.inputs, Mode.TRAINING, case.loss_fn, optimizer, OPTIONS)
    captured = capture(request)
    dataflow = build_dataflow(run_passes(captured).graph_module, captured.device, GradientsInBuffer())
    placeholders = [node.name for node in dataflow.graph_module.graph.nodes if node.op == "placeholder"]
    examples = {
        node
        for node, step_input in zip(placeholders, captured.inputs, strict=True)
        if step_input.role is Role.EXAMPLE
    }
    arrays = enumerate(dataflow.problem.arrays)
    renewed = frozenset(index for index, array in arrays if array.name in examples)
    return CapturedNetwork(name, captured, dataflow, renewed)
