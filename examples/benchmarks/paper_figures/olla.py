"""Figures 7 to 14 of "OLLA: Optimizing the Lifetime and Location of Arrays" (§5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import citations
from .figure import Column, Figure, Row, Series, at

MIB = 2**20
ITERATIONS = 1_000_000
"""Of training (OLLA §5.7)."""


def _mib(title: str, name: str, value: Callable[[Row], int]) -> Column:
    return Column(f"{title}, MiB", f"{name}_mib", lambda row: value(row) / MIB, 2)


def _percent(title: str, name: str, value: Callable[[Row], float]) -> Column:
    return Column(f"{title}, %", f"{name}_percent", lambda row: 100 * value(row), 2)


def _seconds(title: str, name: str, value: Callable[[Row], float | None], decimals: int = 3) -> Column:
    return Column(f"{title}, s", f"{name}_seconds", value, decimals)


def _planned(row: Row) -> int:
    """Return what the planned step needs beside static arrays."""
    return row["peak_bytes"] + row["output_bytes"]


def _in_buffer(row: Row) -> int:
    return row["buffer_bytes"] + row["output_bytes"]


def _less(eager: int, planned: int) -> float:
    return (eager - planned) / eager


def _fragmentation_with_static(row: Row) -> float:
    """Return the share of all reserved bytes, weights included, that is not in use."""
    reserved = row["eager"]["reserved_bytes"]
    return row["eager"]["fragmentation"] * reserved / (reserved + row["static_bytes"])


SOURCE = Column("eager seen", "eager_source", at("eager.source"))
STATIC = _mib("weights, state, inputs", "static", at("static_bytes"))
INDUCTOR = _mib("inductor, live", "inductor_live", at("inductor.live_bytes"))

REORDERING = Figure(
    "olla-7",
    "OLLA Figure 7: peak memory reduction by reordering",
    "step",
    (
        SOURCE,
        _mib("eager, live", "eager_live", at("eager.live_bytes")),
        _mib("planned peak", "planned_peak", _planned),
        _mib("planned, live on the GPU", "planned_live", at("planned.live_bytes")),
        _mib("lower bound", "lower_bound", lambda row: row["lower_bound_bytes"] + row["output_bytes"]),
        _percent("reduction", "reduction", lambda row: _less(row["eager"]["live_bytes"], _planned(row))),
        STATIC,
        _percent(
            "reduction, weights counted",
            "reduction_with_static",
            lambda row: _less(
                row["eager"]["live_bytes"] + row["static_bytes"], _planned(row) + row["static_bytes"]
            ),
        ),
        Column("order proved by", "order_proved_by", lambda row: row["order_proved_by"] or "open"),
        INDUCTOR,
    ),
    (
        Series("reduction_percent", paper=citations.OLLA_REORDERING),
        Series("reduction_percent", "max", citations.OLLA_LARGEST_REORDERING, per_group=False),
        Series("reduction_with_static_percent", paper=citations.OLLA_REORDERING),
        Series("reduction_with_static_percent", "max", citations.OLLA_LARGEST_REORDERING, per_group=False),
    ),
    "%",
    "Bytes requested and not yet freed at the peak, sizes as requested, without what allocators add. The "
    "paper does not say whether weights count; both are shown. Inductor is torch.compile with its own "
    "reordering for peak memory, where it was measured.",
)

FRAGMENTATION = Figure(
    "olla-8",
    "OLLA Figure 8: memory fragmentation",
    "step",
    (
        SOURCE,
        _mib("eager, reserved", "eager_reserved", at("eager.reserved_bytes")),
        _percent("eager, fragmentation", "eager_fragmentation", at("eager.fragmentation")),
        _percent(
            "eager, fragmentation, weights counted",
            "eager_fragmentation_with_static",
            _fragmentation_with_static,
        ),
        _percent(
            "eager, expandable segments",
            "expandable_fragmentation",
            at("expandable.fragmentation"),
        ),
        _percent("inductor, fragmentation", "inductor_fragmentation", at("inductor.fragmentation")),
        _mib("planned peak", "planned_peak", at("peak_bytes")),
        _mib("buffer", "buffer", at("buffer_bytes")),
        _percent("planned, fragmentation", "planned_fragmentation", at("fragmentation")),
    ),
    (
        Series("eager_fragmentation_percent", paper=citations.OLLA_FRAGMENTATION),
        Series("eager_fragmentation_with_static_percent", paper=citations.OLLA_FRAGMENTATION),
        Series(
            "planned_fragmentation_percent",
            paper=(citations.Citation(0.0, "OLLA §5.4, Figure 8", None, "all"),),
        ),
    ),
    "%",
    "(MR - RS) / MR when the reserved memory MR is at its peak, RS being what is in use then.",
)

ORDERING_TIME = Figure(
    "olla-9",
    "OLLA Figure 9: node ordering times",
    "step",
    (
        Column("operators", "operators", at("operators"), 0),
        _seconds("ordering", "order", at("timings.order")),
        Column("found by", "order_found_by", at("order_found_by")),
        Column("proved by", "order_proved_by", lambda row: row["order_proved_by"] or "open"),
    ),
    (
        Series("order_seconds", "median", citations.OLLA_ORDERING_SECONDS, per_group=False),
        Series("order_seconds", "max", citations.OLLA_LONGEST_ORDERING, per_group=False),
        Series("order_seconds", "median"),
    ),
    "s",
    "The paper's are Gurobi's, on its authors' machine; these are the chosen solver's, on this one.",
    logarithmic=True,
)


def _first_within(progress: list[list[Any]], target: float) -> float | None:
    """Return the time when a search first reached a value."""
    return next((seconds for seconds, value, *_ in progress if value <= target), None)


def _order_curve(row: Row) -> list[tuple[float, float]]:
    """Return the memory saved over eager's live bytes, in per cent, over time."""
    eager = row["eager"]["live_bytes"]
    return [
        (seconds, 100 * _less(eager, value + row["output_bytes"]))
        for seconds, value, *_ in row["order_progress"]
    ]


ORDERING_CURVE = Figure(
    "olla-10",
    "OLLA Figure 10: memory saved by reordering over time",
    "step",
    (
        _seconds("first order", "first_order", lambda row: row["order_progress"][0][0]),
        _seconds(
            "within 1 % of the best",
            "within_1_percent",
            lambda row: _first_within(row["order_progress"], 1.01 * row["peak_bytes"]),
        ),
        _seconds("best", "best_order", lambda row: _first_within(row["order_progress"], row["peak_bytes"])),
        _seconds(
            "proven",
            "proven",
            lambda row: (
                row["order_progress"][-1][0] if row["peak_bytes"] == row["lower_bound_bytes"] else None
            ),
        ),
        Column("improvements", "improvements", lambda row: len(row["order_progress"]), 0),
    ),
    (
        Series("best_order_seconds", "median", citations.OLLA_ORDERING_CURVE),
        Series("proven_seconds", "median"),
    ),
    "memory saved, %",
    "Seconds of ordering after which an order, or its proof, was there. The points are in the curve's CSV.",
    curve=_order_curve,
)

PLACEMENT_TIME = Figure(
    "olla-11",
    "OLLA Figure 11: times to eliminate fragmentation",
    "step",
    (
        Column("arrays", "arrays", at("arrays"), 0),
        _seconds("placing", "place", at("timings.place")),
        _percent("fragmentation left", "planned_fragmentation", at("fragmentation")),
        Column("found by", "place_found_by", at("place_found_by")),
    ),
    (
        Series("place_seconds", "median", citations.OLLA_PLACEMENT_SECONDS, per_group=False),
        Series("place_seconds", "max", per_group=False),
        Series("place_seconds", "median"),
    ),
    "s",
    "The paper's are Gurobi's, on its authors' machine; these are the chosen solver's, on this one.",
    logarithmic=True,
)


def _place_curve(row: Row) -> list[tuple[float, float]]:
    """Return the fragmentation of the best placement, in per cent, over time."""
    return [
        (seconds, 100 * (value - row["peak_bytes"]) / value) for seconds, value, *_ in row["place_progress"]
    ]


PLACEMENT_CURVE = Figure(
    "olla-12",
    "OLLA Figure 12: fragmentation over time",
    "step",
    (
        _seconds("first placement", "first_placement", lambda row: row["place_progress"][0][0]),
        _percent(
            "its fragmentation",
            "first_fragmentation",
            lambda row: (row["place_progress"][0][1] - row["peak_bytes"]) / row["place_progress"][0][1],
        ),
        _seconds(
            "below 1 %",
            "below_1_percent",
            lambda row: _first_within(row["place_progress"], row["peak_bytes"] / 0.99),
        ),
        _seconds(
            "none", "no_fragmentation", lambda row: _first_within(row["place_progress"], row["peak_bytes"])
        ),
    ),
    (
        Series("below_1_percent_seconds", "median", citations.OLLA_PLACEMENT_CURVE),
        Series("no_fragmentation_seconds", "median"),
    ),
    "fragmentation, %",
    "Seconds of placing after which a placement was there. The points are in the curve's CSV.",
    curve=_place_curve,
)

TOTAL = Figure(
    "olla-13",
    "OLLA Figure 13: total reduction in peak memory",
    "step",
    (
        SOURCE,
        _mib("eager, reserved", "eager_reserved", at("eager.reserved_bytes")),
        _mib("eager, expandable segments", "expandable_reserved", at("expandable.reserved_bytes")),
        _mib("inductor, reserved", "inductor_reserved", at("inductor.reserved_bytes")),
        _mib("planned: buffer and outputs", "planned", _in_buffer),
        Column("arrays live in", "binding", at("binding")),
        _mib("planned, reserved on the GPU", "planned_reserved", at("planned.reserved_bytes")),
        _percent(
            "reduction", "reduction", lambda row: _less(row["eager"]["reserved_bytes"], _in_buffer(row))
        ),
        _percent(
            "reduction, weights counted",
            "reduction_with_static",
            lambda row: _less(
                row["eager"]["reserved_bytes"] + row["static_bytes"], _in_buffer(row) + row["static_bytes"]
            ),
        ),
    ),
    (
        Series("reduction_percent", paper=citations.OLLA_TOTAL),
        Series("reduction_with_static_percent", paper=citations.OLLA_TOTAL),
    ),
    "%",
    "Memory that the allocator reserves for an eager step, and what the planned step needs.",
)


def _planning(row: Row) -> float:
    return sum(seconds for stage, seconds in row["timings"].items() if stage != "build")


SECONDS_SAVED = Figure(
    "olla-14",
    "OLLA Figure 14: allocation time saved over a million iterations",
    "step",
    (
        Column("requests a step", "requests", at("allocation.requests"), 0),
        Column(
            "allocator, µs a step",
            "stock_microseconds",
            lambda row: 1e6 * row["allocation"]["stock_seconds"],
        ),
        Column(
            "planned, µs a step",
            "served_microseconds",
            lambda row: 1e6 * row["allocation"]["served_seconds"],
        ),
        _seconds("planning, once", "planning", _planning, 1),
        _seconds(
            "saved",
            "saved",
            lambda row: (
                ITERATIONS * (row["allocation"]["stock_seconds"] - row["allocation"]["served_seconds"])
                - _planning(row)
            ),
            0,
        ),
    ),
    (Series("saved_seconds", paper=citations.OLLA_SECONDS_SAVED),),
    "s",
    "The requests and frees of one eager step made again, with nothing computed between them, by PyTorch's "
    "allocator and from a planned buffer; a million times their difference, less the seconds of planning. "
    "Memory is not touched, so page faults are not in it.",
)

FIGURES = (
    REORDERING,
    FRAGMENTATION,
    ORDERING_TIME,
    ORDERING_CURVE,
    PLACEMENT_TIME,
    PLACEMENT_CURVE,
    TOTAL,
    SECONDS_SAVED,
)
