"""Lists what is to be measured: one job for each model, batch and kind of measurement.

A job is measured in a process of its own and its result kept as one JSON file, so that a run resumes where it
stopped. A result counts only for the very job that it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ordering import MODELS, SMALLEST_BATCH

from olla_solvers.errors import OptionError

MODELS_FOLDER = Path(__file__).parent / "models"

OLLA = tuple(f"olla-{number}" for number in range(7, 15))
SEKIYAMA = ("sekiyama-2", "sekiyama-3")
SMARTPOOL = ("smartpool-1",)
FIGURES = (*OLLA, *SEKIYAMA, *SMARTPOOL)

SEKIYAMA_MODELS = {
    "alexnet": ("torchvision:alexnet", (32, 64, 128)),
    "googlenet": ("torchvision:googlenet", (32, 64, 128)),
    "resnet50": ("torchvision:resnet50", (32, 64, 128)),
    "inception_resnet": ("inception_resnet.py:inception_resnet_v2", (32, 64, 128)),
    "seq2seq": ("seq2seq.py:seq2seq", (32, 64, 128, 256)),
}
"""The models of "Profile-guided memory optimization" §5.1, with the batches they were trained with."""

SMARTPOOL_MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "vgg11", "vgg13", "vgg16", "vgg19")
"""The models of SmartPool's Table I, made for CIFAR-10."""

SMARTPOOL_BATCH = 100

QUICK_MODELS = ("torchvision:alexnet", "torch:transformer-1")
QUICK_BATCHES = (1, 4)
QUICK_SEKIYAMA = {"alexnet": ("torchvision:alexnet", (4,))}
QUICK_SMARTPOOL = ("resnet18", "vgg11")


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        kind: ``step`` (OLLA's figures), ``eager`` and ``inductor`` (other baselines of the same step),
            ``loop`` (Sekiyama's figures), ``pool`` (SmartPool's table).
        model: a name for :func:`olla_fx.models.build_model`; files may be those beside this one.
        batch: examples in a batch.
        group: the batch size that was asked for; ``batch`` is larger where a model needs that.
        device: ``cpu`` or ``cuda``.
        solver: of the integer programs, for planning.
        time_limit: seconds for ordering and for placing; None for the planner's own.
        train: True if the step trains.
        timed: True if the step is run for its time, too.
        allocator: settings of PyTorch's CUDA allocator; empty for its default.
    """

    kind: str
    model: str
    batch: int
    group: int
    device: str
    solver: str = "auto"
    time_limit: float | None = None
    train: bool = True
    timed: bool = False
    allocator: str = ""

    @property
    def name(self) -> str:
        """The model and the batch."""
        return f"{short(self.model)} x{self.batch}{'' if self.train else ' inference'}"

    def path(self, output: Path) -> Path:
        """Return the path of its result."""
        batch = str(self.batch) if self.batch == self.group else f"{self.batch}-for-{self.group}"
        words = [short(self.model), batch, "" if self.train else "inference", self.allocator]
        name = "_".join(re.sub(r"[^\w.-]+", "-", word) for word in words if word)
        return output / self.device / self.kind / f"{name}.json"

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @property
    def model_name(self) -> str:
        """The name, with its full path for a file beside this one."""
        beside = MODELS_FOLDER / self.model
        return str(beside) if Path(str(beside).rpartition(":")[0]).is_file() else self.model


def short(model: str) -> str:
    """Return a model's name without its family or file."""
    return model.rpartition(":")[2]


def jobs_of(
    figures: Iterable[str],
    *,
    device: str,
    models: Sequence[str] | None,
    batches: Sequence[int] | None,
    solver: str,
    time_limit: float | None,
    inductor: bool,
    quick: bool,
) -> list[Job]:
    """Return all jobs that some figures need.

    Args:
        figures: from :data:`FIGURES`.
        device: ``cpu`` or ``cuda``.
        models: for OLLA's figures; None for the paper's own.
        batches: for OLLA's figures; None for 1 and 32.
        solver: for planning.
        time_limit: seconds for each stage of planning.
        inductor: True if torch.compile is measured on the same steps.
        quick: a few small models only.

    Raises:
        OptionError: if two models have one name, which could not be told apart in files and rows.
    """
    _refuse_namesakes(models or ())
    wanted = set(figures)
    common = {"device": device, "solver": solver, "time_limit": time_limit}
    jobs: list[Job] = []
    if wanted & set(OLLA):
        models = models or (QUICK_MODELS if quick else MODELS)
        for group in batches or (QUICK_BATCHES if quick else (1, 32)):
            for model in models:
                batch = max(group, SMALLEST_BATCH.get(model, 1))
                jobs.append(Job("step", model, batch, group, **common))
                if device == "cuda":
                    expandable = "expandable_segments:True"
                    jobs.append(Job("eager", model, batch, group, allocator=expandable, **common))
                if inductor:
                    jobs.append(Job("inductor", model, batch, group, **common))
    if wanted & set(SEKIYAMA):
        jobs += _sekiyama_jobs(QUICK_SEKIYAMA if quick else SEKIYAMA_MODELS, "sekiyama-3" in wanted, common)
    if wanted & set(SMARTPOOL):
        for name in QUICK_SMARTPOOL if quick else SMARTPOOL_MODELS:
            jobs.append(Job("pool", f"cifar.py:{name}", SMARTPOOL_BATCH, SMARTPOOL_BATCH, **common))
    return list(dict.fromkeys(jobs))


def _refuse_namesakes(models: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for model in models:
        other = seen.setdefault(short(model), model)
        if other != model:
            raise OptionError(
                f"--models: {other} and {model} are both called {short(model)} in files and tables; measure "
                "each in a run of its own, with an --output of its own"
            )


def _sekiyama_jobs(
    models: dict[str, tuple[str, tuple[int, ...]]], timed: bool, common: dict[str, Any]
) -> list[Job]:
    """Return training at every batch and inference of one input; on a CPU only the smallest is timed."""
    jobs = []
    for model, batches in models.values():
        for batch in batches:
            run = timed and (batch == batches[0] or common["device"] == "cuda")
            jobs.append(Job("loop", model, batch, batch, timed=run, **common))
        jobs.append(Job("loop", model, 1, 1, train=False, timed=timed, **common))
    return jobs
