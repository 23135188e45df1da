"""Drops units one after the other until a budget is met: by bytes beyond it, removed per second.

What dropping a unit would save is estimated for all of them from one walk: its bytes at the timesteps beyond
the budget between its last reader of forward and its first other one, less what its repetition keeps alive
there, per second of what would run again. The most promising are tried, first many at once, and kept if the
walk shows about what was estimated. Then everything is estimated anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.evaluate import Evaluation, Evaluator, States
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.recomputation.walk import KEPT, NEVER, ONCE

TRIED_ALONE = 4
"""Units that are tried each by itself before the best of them is dropped."""

AS_ESTIMATED = 0.5
"""Share of the estimated saving that a step of several units must show."""

SHARE_OF_STEP = 0.5
"""Share of the bytes beyond the budget that one step of several units is to remove."""

LEAST_SECONDS = 1e-9
"""Taken for repetitions that take no time, so that bytes per second are numbers."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit that could be dropped.

    Attributes:
        unit: which.
        saving: estimated bytes beyond the budget, summed over timesteps, that go.
        seconds: estimated, of what would run again.
    """

    unit: int
    saving: float
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.saving / max(self.seconds, LEAST_SECONDS)


@dataclass(frozen=True, slots=True)
class Found:
    """States, and what they cost."""

    states: States
    evaluation: Evaluation


class Greedy:
    """Meets budgets on one step."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Note what each unit reads from outside."""
        self.evaluator = evaluator
        self._instance = evaluator.instance
        self._read = arrays_read(evaluator.instance)

    def meet(self, start: Found, budget_bytes: Bytes, most_seconds: Seconds, most_walks: int) -> Found:
        """Drop units until the budget is met, or nothing more helps, or it takes too much time.

        Args:
            start: valid states.
            budget_bytes: the peak to reach.
            most_seconds: of repetitions.
            most_walks: after which to stop.

        Returns:
            The states reached; their peak may be above the budget.
        """
        evaluator, found = self.evaluator, start
        last_walk = evaluator.walks + most_walks
        useless: set[int] = set()
        while found.evaluation.peak_bytes > budget_bytes and evaluator.walks < last_walk:
            evaluator.evaluate(found.states)
            beyond = evaluator.excess(found.evaluation, budget_bytes)
            room = most_seconds - found.evaluation.extra_seconds
            ranked = [
                candidate
                for candidate in self.candidates(found, budget_bytes)
                if candidate.unit not in useless and candidate.seconds <= room
            ]
            if not _is_in_reach(ranked, beyond, room):
                break
            better = self._several(found, ranked, beyond, budget_bytes, most_seconds)
            if better is None:
                better = self._one(found, ranked, beyond, budget_bytes, most_seconds, useless)
            if better is not None:
                found = better
            elif len(ranked) <= TRIED_ALONE:
                break
        return found

    def candidates(self, found: Found, budget_bytes: Bytes) -> list[Candidate]:
        """Return the kept units that could be dropped, best first; the last walk must have been this state's."""
        trace, units = self.evaluator.trace, self._instance.units
        timesteps = found.evaluation.timesteps
        above = [0, *accumulate(int(each > budget_bytes) for each in trace.timestep_bytes[:timesteps])]
        array_bytes = self._instance.flat.array_bytes
        result = []
        for unit, arrays in enumerate(units.arrays):
            if found.states[unit] != KEPT:
                continue
            again = min(trace.first_late[array] for array in arrays)
            if again == NEVER:
                continue
            saving = 0
            for array in arrays:
                if trace.first_late[array] != NEVER and trace.last_early[array] + 1 < again:
                    saving += array_bytes[array] * (above[again] - above[trace.last_early[array] + 1])
            if saving > 0:
                lengthened, seconds = self._consequences(found.states, unit, again, above)
                if saving > lengthened:
                    result.append(Candidate(unit, saving - lengthened, seconds))
        return sorted(result, key=lambda each: (-each.rate, each.unit))

    def _consequences(self, states: States, unit: int, again: int, above: list[int]) -> tuple[float, Seconds]:
        """Estimate what a repetition at a timestep keeps alive beyond the budget, and its seconds."""
        trace, flat, units = self.evaluator.trace, self._instance.flat, self._instance.units
        lengthened, seconds = 0.0, 0.0
        seen = {unit}
        for each in (todo := [unit]):
            seconds += units.seconds[each]
            for array in self._read[each]:
                owner = flat.unit_of[array]
                if owner >= 0 and states[owner] != KEPT and trace.runs[owner] == 0:
                    if owner not in seen:
                        seen.add(owner)
                        todo.append(owner)
                    continue
                version = trace.current[array]
                first, last = trace.first[version], trace.last[version]
                if last < again:
                    lengthened += trace.version_bytes[version] * (above[again] - above[last + 1])
                elif first > again:
                    lengthened += trace.version_bytes[version] * (above[first] - above[again])
        return lengthened, seconds

    def _several(
        self, found: Found, ranked: list[Candidate], beyond: float, budget_bytes: Bytes, most_seconds: Seconds
    ) -> Found | None:
        """Drop the best together, and half of them as often as the walk shows too little."""
        chosen, saving = [], 0.0
        for candidate in ranked:
            if saving + candidate.saving > SHARE_OF_STEP * beyond:
                break
            chosen.append(candidate)
            saving += candidate.saving
        while len(chosen) > 1:
            better = self._dropped(found, [each.unit for each in chosen])
            if better.evaluation.is_valid and better.evaluation.extra_seconds <= most_seconds:
                removed = beyond - self.evaluator.excess(better.evaluation, budget_bytes)
                if removed >= AS_ESTIMATED * sum(each.saving for each in chosen):
                    return better
            chosen = chosen[: len(chosen) // 2]
        return None

    def _one(
        self,
        found: Found,
        ranked: list[Candidate],
        beyond: float,
        budget_bytes: Bytes,
        most_seconds: Seconds,
        useless: set[int],
    ) -> Found | None:
        """Try the best few, and drop the one that removes most per second."""
        best, best_rate = None, 0.0
        for candidate in ranked[:TRIED_ALONE]:
            better = self._dropped(found, [candidate.unit])
            removed = 0.0
            if better.evaluation.is_valid and better.evaluation.extra_seconds <= most_seconds:
                removed = beyond - self.evaluator.excess(better.evaluation, budget_bytes)
            if removed <= 0:
                useless.add(candidate.unit)
                continue
            seconds = better.evaluation.extra_seconds - found.evaluation.extra_seconds
            if removed / max(seconds, LEAST_SECONDS) > best_rate:
                best, best_rate = better, removed / max(seconds, LEAST_SECONDS)
        return best

    def _dropped(self, found: Found, units: list[int]) -> Found:
        states = list(found.states)
        for unit in units:
            states[unit] = ONCE
        return Found(states, self.evaluator.evaluate(states))


def _is_in_reach(ranked: list[Candidate], beyond: float, room: Seconds) -> bool:
    """Return False if the best candidates, by what was estimated, take more seconds than there are."""
    seconds = 0.0
    for candidate in ranked:
        if candidate.saving >= beyond:
            return seconds + candidate.seconds * beyond / candidate.saving <= room
        beyond -= candidate.saving
        seconds += candidate.seconds
        if seconds > room:
            return False
    # What is not a candidate yet may become one.
    return bool(ranked)


def arrays_read(instance: Instance) -> list[list[ArrayIndex]]:
    """Return for each unit the arrays in the buffer that it reads, without its own."""
    return [
        sorted(
            {
                array
                for operator in operators
                for array in instance.reads[operator]
                if instance.units.of_array[array] != unit
            }
        )
        for unit, operators in enumerate(instance.units.operators)
    ]


def prune(evaluator: Evaluator, found: Found, budget_bytes: Bytes, most_walks: int) -> Found:
    """Keep again what need not be dropped for a budget, the dearest first.

    Args:
        evaluator: of the step.
        found: states within the budget.
        budget_bytes: the peak that may not be passed.
        most_walks: after which to stop.
    """
    units = evaluator.instance.units
    last_walk = evaluator.walks + most_walks
    evaluator.evaluate(found.states)
    dropped = [unit for unit, runs in enumerate(evaluator.trace.runs) if runs]
    for unit in sorted(dropped, key=lambda unit: (-units.seconds[unit], unit)):
        if evaluator.walks >= last_walk:
            break
        states = list(found.states)
        states[unit] = KEPT
        evaluation = evaluator.evaluate(states)
        if (
            evaluation.is_valid
            and evaluation.peak_bytes <= budget_bytes
            and evaluation.extra_seconds < found.evaluation.extra_seconds
        ):
            found = Found(states, evaluation)
    return found
