"""Cites what the papers themselves report, and the place of each number in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """A number of a paper.

    Attributes:
        value: in the unit of the column beside which it is put.
        where: the place in the paper.
        group: the batch size that it is for; None for all.
        words: what it says, if that is not the column's title.
    """

    value: float
    where: str
    group: int | None = None
    words: str = ""


OLLA_REORDERING = (
    Citation(22.5, "OLLA §5.3, Figure 7", 1, "average"),
    Citation(10.1, "OLLA §5.3, Figure 7", 32, "average"),
)
OLLA_FRAGMENTATION = (
    Citation(7.9, "OLLA §5.4, Figure 8", 1, "average"),
    Citation(26.1, "OLLA §5.4, Figure 8", 32, "average"),
)
OLLA_ORDERING_SECONDS = (Citation(1.4, "OLLA §5.5, Figure 9", None, "median, ± 0.2"),)
OLLA_LARGEST_REORDERING = (Citation(38.0, "OLLA §5.3", None, "largest"),)
OLLA_LONGEST_ORDERING = (Citation(5.2, "OLLA §5.5, Figure 9", None, "longest but EfficientNet's"),)
OLLA_ORDERING_CURVE = (
    Citation(120.0, "OLLA §5.5, Figure 10", 1, "EfficientNet, until optimal"),
    Citation(300.0, "OLLA §5.5, Figure 10", 32, "EfficientNet, until within 1 %"),
)
OLLA_PLACEMENT_SECONDS = (Citation(5.7, "OLLA §5.6, Figure 11", None, "median, ± 0.6"),)
OLLA_PLACEMENT_CURVE = (
    Citation(300.0, "OLLA §5.6, Figure 12", None, "GoogLeNet and EfficientNet, until below 1 %, at most"),
)
OLLA_TOTAL = (
    Citation(30.4, "OLLA §5.7, Figure 13", 1, "average"),
    Citation(36.1, "OLLA §5.7, Figure 13", 32, "average"),
)
OLLA_SECONDS_SAVED = (Citation(300.0, "OLLA §5.7, Figure 14", 32, "average: 5 minutes"),)

SEKIYAMA_MEMORY = {
    ("googlenet", False): Citation(12.6, "PGA §5.2, Figure 2b"),
    ("resnet50", False): Citation(10.0, "PGA §5.2, Figure 2b"),
    ("seq2seq", False): Citation(14.6, "PGA §5.3, Figure 2d"),
}
"""Reductions in per cent by model and whether it trains; the figure's bars are not in its text."""

SEKIYAMA_LARGEST = Citation(49.5, "PGA abstract and §1", None, "largest, of all models and batches")

SEKIYAMA_TIME = {
    ("inception_resnet_v2", True): Citation(1 / 2.19, "PGA §5.2: 2.19 times as fast"),
    ("seq2seq", False): Citation(1 - 0.238, "PGA §5.3, Figure 3d: 23.8 % less"),
}
"""Optimised over original time by model and whether it trains."""

SMARTPOOL_LOAD_MB = {
    "resnet18": 1452, "resnet34": 2824, "resnet50": 4418, "resnet101": 8367,
    "vgg11": 389, "vgg13": 509, "vgg16": 647, "vgg19": 785,
}  # fmt: skip
SMARTPOOL_RATIO = {
    "resnet18": 1.003, "resnet34": 1.001, "resnet50": 1.003, "resnet101": 1.0005,
    "vgg11": 1.013, "vgg13": 1.016, "vgg16": 1.012, "vgg19": 1.011,
}  # fmt: skip
CNMEM_RATIO = {
    "resnet18": 1.033, "resnet34": 1.028, "resnet50": 1.030, "resnet101": 1.028,
    "vgg11": 1.169, "vgg13": 1.115, "vgg16": 1.113, "vgg19": 1.072,
}  # fmt: skip
"""SmartPool Table I: memory load in MB, and the competitive ratios of SmartPool and of CnMem."""
