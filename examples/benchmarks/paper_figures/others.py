"""Figures 2 and 3 of "Profile-guided memory optimization" (PGA) §5, and SmartPool's Table I (§VI-A)."""

from __future__ import annotations

from . import citations
from .citations import Citation
from .figure import Column, Figure, Row, Series, at

MIB = 2**20


def _mode(row: Row) -> str:
    return "training" if row["train"] else "inference"


def _cited(table: dict[tuple[str, bool], Citation], row: Row) -> float | None:
    citation = table.get((row["model"], row["train"]))
    return None if citation is None else citation.value


def _saved(row: Row, name: str) -> float:
    """Return the saved share of what the caching allocator reserves, in per cent."""
    return 100 * (row["eager"]["reserved_bytes"] - row[name]) / row["eager"]["reserved_bytes"]


def _mib(title: str, name: str, key: str) -> Column:
    return Column(f"{title}, MiB", f"{name}_mib", lambda row: row[key] / MIB, 2)


SEKIYAMA_MEMORY = Figure(
    "sekiyama-2",
    "Profile-guided allocation, Figure 2: memory consumption in training and inference",
    "loop",
    (
        Column("mode", "mode", _mode),
        Column("eager seen", "eager_source", at("eager.source")),
        _mib("retained: weights, state, inputs", "retained", "static_bytes"),
        Column(
            "orig: caching allocator, MiB",
            "reserved_mib",
            lambda row: row["eager"]["reserved_bytes"] / MIB,
            2,
        ),
        _mib("opt: their heuristic, same requests", "skyline", "skyline_bytes"),
        _mib("our search, same requests", "placed", "placed_bytes"),
        _mib("our plan, reordered", "buffer", "buffer_bytes"),
        Column("opt saves, %", "skyline_saved_percent", lambda row: _saved(row, "skyline_bytes"), 2),
        Column("plan saves, %", "plan_saved_percent", lambda row: _saved(row, "buffer_bytes"), 2),
        Column(
            "opt saves in the paper, %",
            "paper_saved_percent",
            lambda row: _cited(citations.SEKIYAMA_MEMORY, row),
            1,
        ),
    ),
    (
        Series("skyline_saved_percent", per_group=False),
        Series("plan_saved_percent", per_group=False),
        Series("paper_saved_percent", per_group=False),
    ),
    "%",
    "Orig is PyTorch's caching allocator, not Chainer's pool; opt places the very requests of eager with "
    "the paper's best-fit heuristic (longest lifetime first). What is retained is saved by nobody. "
    "Seq2seq's saving in the paper comes from sentences of changing lengths, which fill Chainer's pool with "
    "blocks that do not fit; sentences here are of one length. The paper's inference processes one input. On "
    "a GPU seq2seq runs without cuDNN, eager too.",
    references=(citations.SEKIYAMA_LARGEST,),
)

SEKIYAMA_TIME = Figure(
    "sekiyama-3",
    "Profile-guided allocation, Figure 3: time of a mini-batch in training and of an input in inference",
    "loop",
    (
        Column("mode", "mode", _mode),
        Column("orig: eager, s", "eager_seconds", at("eager_seconds"), 4),
        Column("opt: planned, s", "planned_seconds", at("planned_seconds"), 4),
        Column("planned / eager", "ratio", lambda row: row["planned_seconds"] / row["eager_seconds"], 3),
        Column("opt / orig in the paper", "paper_ratio", lambda row: _cited(citations.SEKIYAMA_TIME, row), 3),
    ),
    (Series("ratio", "median", per_group=False), Series("paper_ratio", "median", per_group=False)),
    "ratio of times",
    "Medians of pairs of steps, one right after the other; on a CPU, of the smallest batch and inference. "
    "The paper's times are a P100's, with Chainer 3. On a GPU seq2seq runs without cuDNN, eager too.",
)

SMARTPOOL = Figure(
    "smartpool-1",
    "SmartPool, Table I: competitive ratio",
    "pool",
    (
        Column("load, MiB", "load_mib", lambda row: row["load_bytes"] / MIB, 2),
        Column(
            "load in the paper, MB", "paper_load_mb", lambda row: citations.SMARTPOOL_LOAD_MB[row["model"]], 0
        ),
        Column(
            "caching allocator",
            "caching_ratio",
            lambda row: row["eager"]["reserved_bytes"] / row["eager"]["live_bytes"],
            4,
        ),
        Column("SmartPool's heuristic", "smartpool_ratio", lambda row: _ratio(row, "size-best-fit"), 4),
        Column("first fit", "first_fit_ratio", lambda row: _ratio(row, "size-first-fit"), 4),
        Column("PGA's heuristic", "skyline_ratio", lambda row: _ratio(row, "skyline"), 4),
        Column("our search", "auto_ratio", lambda row: _ratio(row, "auto"), 4),
        Column(
            "SmartPool in the paper",
            "paper_smartpool_ratio",
            lambda row: citations.SMARTPOOL_RATIO[row["model"]],
            4,
        ),
        Column("CnMem in the paper", "paper_cnmem_ratio", lambda row: citations.CNMEM_RATIO[row["model"]], 4),
    ),
    tuple(
        Series(name, per_group=False)
        for name in (
            "caching_ratio",
            "smartpool_ratio",
            "auto_ratio",
            "paper_smartpool_ratio",
            "paper_cnmem_ratio",
        )
    ),
    "footprint / load",
    "Memory footprint over peak memory load, 1 being perfect, of one training iteration at batch 100 on "
    "images of 32x32 (CIFAR-10); largest arrays first into the smallest hole is SmartPool's heuristic. "
    "Requests are followed on fake tensors. The paper's own figures stand in SmartPool Table I; its loads "
    "come from SINGA.",
)


def _ratio(row: Row, method: str) -> float:
    return row["heights"][method] / row["load_bytes"]


FIGURES = (SEKIYAMA_MEMORY, SEKIYAMA_TIME, SMARTPOOL)
