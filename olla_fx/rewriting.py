"""Chooses among a step's rewrites those that pay: graph → graph, dataflow and a first order.

A rewrite lets backward keep less, but whether the peak falls by it shows in an order alone. So a few
selections are ordered quickly, by :func:`olla_solvers.order.order_quickly`:

* all rewrites, with gradients in blocks if the peak falls without these gradients;
* without those that take time, another pass over an array or a product, unless the peak rises;
* none, if the others' peak is above what the step needs in every order without rewrites: on small graphs one
  was seen to need more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from olla_fx.capture import CapturedStep
from olla_fx.dataflow import Dataflow, GradientsInBuffer, build_dataflow
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted
from olla_fx.passes.rewrites.blocked_updates import BLOCKS_IN_PEAK, gradients_of_updates
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputed import Recomputed
from olla_fx.rewrites import Change, LossChunks
from olla_fx.swapped import Swapped
from olla_fx.workspaces import Workspaces, with_workspaces
from olla_solvers.analysis import lifetimes, resident_bytes, timesteps
from olla_solvers.order import order_quickly
from olla_solvers.order.bounds import precedence_bound
from olla_solvers.plan import Schedule

COSTLY = frozenset({"boolean_masks", "narrow_indices", "packed_masks"})
"""Rewrites that may take time: most read an array once more."""

COSTLIEST = frozenset({"chunked_loss"})
"""Rewrites that compute again, and are made only if asked for."""

LEAST_GAIN = 0.002
"""Share of the peak that a rewrite which takes time must save."""

MOST_ROUNDS = 3
"""How often gradients that come to the peak when larger ones are gone are cut, too."""


@dataclass(frozen=True)
class Candidate:
    """A step's graph after some rewrites.

    Attributes:
        dataflow: the graph after all passes.
        changes: what the rewrites have changed.
        schedule: an order of it.
        wanted: the rewrites that it was made with; None for none.
        recomputed: what its backward computes again.
        swapped: what waits on the host.
        refused: what was not done since kernels do not give equal bits here.
    """

    dataflow: Dataflow
    changes: tuple[Change, ...] = ()
    schedule: Schedule | None = None
    wanted: Wanted | None = None
    recomputed: Recomputed = field(default_factory=Recomputed)
    swapped: Swapped = field(default_factory=Swapped)
    refused: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak of its order, which was found quickly."""
        if self.schedule is None:
            raise ValueError("the candidate was not ordered")
        return self.schedule.peak_bytes


@dataclass(frozen=True)
class Rewriting:
    """What is needed to make and compare candidates.

    Attributes:
        captured: the step.
        gradients: those that are made in the buffer.
        probe: says whether kernels give equal bits.
        seconds: the most that an order may take, by the clock.
        loss_chunks: how to compute losses in chunks; None to have them whole.
        workspaces: of kinds of operators, as far as they are known.
    """

    captured: CapturedStep
    gradients: GradientsInBuffer
    probe: Probe
    seconds: float = math.inf
    loss_chunks: LossChunks | None = None
    workspaces: Workspaces = field(default_factory=dict)

    def candidate(self, names: Collection[str], cuts: Mapping[str, int] | None = None) -> Candidate:
        """Rewrite the step; it is not ordered yet."""
        return self._after_passes(
            Wanted(names, self.probe, dict(cuts or {}), self.loss_chunks) if names else None
        )

    def keeping_phases(self, candidate: Candidate) -> Candidate:
        """Return a candidate in whose graph nothing is written over what an earlier phase made."""
        return self._after_passes(candidate.wanted, keep_phases=True)

    def made_with(self, wanted: Wanted | None) -> Candidate:
        """Return the candidate with some rewrites, for the gradients and with the workspaces of this one."""
        return self._after_passes(wanted)

    def with_workspaces(self, dataflow: Dataflow) -> Dataflow:
        """Return a dataflow with what is known of workspaces."""
        return with_workspaces(dataflow, self.workspaces)

    def _after_passes(self, wanted: Wanted | None, *, keep_phases: bool = False) -> Candidate:
        rewritten = run_passes(self.captured, wanted, keep_phases=keep_phases)
        dataflow = build_dataflow(rewritten.graph_module, self.captured.device, self.gradients)
        return Candidate(self.with_workspaces(dataflow), rewritten.changes, wanted=wanted)

    def ordered(self, candidate: Candidate, start: Sequence[str] | None = None) -> Candidate:
        """Return a candidate with an order.

        Args:
            candidate: any.
            start: operators' names in an order to begin from.
        """
        if candidate.schedule is not None:
            return candidate
        schedule = order_quickly(candidate.dataflow.problem, self.seconds, start=start)
        return replace(candidate, schedule=schedule)


def choose_rewrites(rewriting: Rewriting, names: Collection[str]) -> Candidate:
    """Return the candidate with the smallest peak; see the module docstring.

    Args:
        rewriting: the step.
        names: of the rewrites to choose from.

    Returns:
        It has an order only if one was needed for the choice.
    """
    cuts: dict[str, int] = {}
    best = rewriting.candidate(names)
    for _ in range(MOST_ROUNDS if "blocked_updates" in names else 0):
        best, more = _in_blocks(rewriting, names, best, cuts)
        if not more:
            break
        cuts.update(more)
    for costly in (COSTLIEST, COSTLY):
        best, names = _without_costly(rewriting, names, best, cuts, costly)
    if not best.changes:
        return best
    best = rewriting.ordered(best)
    plain = rewriting.candidate(())
    if precedence_bound(plain.dataflow.problem) >= best.peak_bytes:
        return best
    plain = rewriting.ordered(plain)
    return best if best.peak_bytes < plain.peak_bytes else plain


def by_time(rewriting: Rewriting, candidate: Candidate) -> tuple[Candidate, ...]:
    """Return a candidate without and with the rewrites that compute again, for a budget to choose from.

    Where arrays are dropped and made again, these may lower the peak though they do not lower it without.

    Args:
        rewriting: the step.
        candidate: with the rewrites that pay without a budget.

    Returns:
        The fastest first; one alone if such rewrites are not wanted, or find nothing.
    """
    wanted = candidate.wanted
    if wanted is None or rewriting.loss_chunks is None:
        return (candidate,)
    fewer = [name for name in wanted.names if name not in COSTLIEST]
    if any(change.rewrite in COSTLIEST for change in candidate.changes):
        return rewriting.candidate(fewer, wanted.cuts), candidate
    more = rewriting.candidate([*fewer, *COSTLIEST], wanted.cuts)
    is_other = any(change.rewrite in COSTLIEST for change in more.changes)
    return (candidate, more) if is_other else (candidate,)


def _in_blocks(
    rewriting: Rewriting, names: Collection[str], candidate: Candidate, cuts: Mapping[str, int]
) -> tuple[Candidate, Mapping[str, int]]:
    """Return the candidate with the gradients in blocks that are at its peak, and what was cut."""
    gradients = gradients_of_updates(candidate.dataflow.graph_module.graph)
    if not gradients:
        return candidate, {}
    candidate = rewriting.ordered(candidate)
    more = _gradients_at_peak(candidate, gradients)
    if not more:
        return candidate, {}
    in_blocks = rewriting.ordered(rewriting.candidate(names, {**cuts, **more}))
    if in_blocks.peak_bytes < (1 - LEAST_GAIN) * candidate.peak_bytes:
        return in_blocks, more
    return candidate, {}


def _without_costly(
    rewriting: Rewriting,
    names: Collection[str],
    candidate: Candidate,
    cuts: Mapping[str, int],
    costly: Collection[str],
) -> tuple[Candidate, Collection[str]]:
    """Return the candidate without those of its rewrites that take time, if these save nothing.

    Returns:
        The candidate, and the names of the rewrites that it may have.
    """
    if not any(change.rewrite in costly for change in candidate.changes):
        return candidate, names
    candidate = rewriting.ordered(candidate)
    fewer = [name for name in names if name not in costly]
    cheaper = rewriting.ordered(rewriting.candidate(fewer, cuts))
    is_worth_it = candidate.peak_bytes < (1 - LEAST_GAIN) * cheaper.peak_bytes
    return (candidate, names) if is_worth_it else (cheaper, fewer)


def _gradients_at_peak(candidate: Candidate, gradients: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Return the gradients without which the peak would be lower, each with the bytes of a block.

    Args:
        candidate: with an order.
        gradients: those that can be computed in blocks, each with the operators of its update.
    """
    problem = candidate.dataflow.problem
    order = candidate.schedule.order if candidate.schedule is not None else ()
    resident = resident_bytes(problem, order)
    timestep = timesteps(order)
    at = {operator.name: timestep[index] for index, operator in enumerate(problem.operators)}
    alive = lifetimes(problem, order)
    others = list(resident)
    sizes = {array.name: array.size_bytes for array in problem.planned}
    for name, update in gradients.items():
        for array in {name, *update} & alive.keys():
            for time in range(alive[array].lower, alive[array].upper):
                others[time] -= sizes[array]
    needed_bytes = max(others, default=0)
    return {
        name: needed_bytes // BLOCKS_IN_PEAK
        for name, update in gradients.items()
        if any(resident[at[operator]] > needed_bytes for operator in update)
    }
