"""Drops units one after the other until a budget is met: by bytes beyond it, removed per second.

What dropping a unit would change is estimated for all of them from one walk: its bytes go between its last
reader of forward and its first other one, what its repetition reads lives until then, and that and what runs
before it takes seconds. Units are chosen lazily: the one with the best rate so far is looked at again with
what those chosen before it have left beyond the budget, and chosen if its rate is still the best. Some are
chosen before the next walk, fewer if the walk shows much less than was estimated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.evaluate import Evaluator, States
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.pool import Evaluated
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.recomputation.walk import KEPT, NEVER, ONCE

TRIED_ALONE = 4
"""Units that are tried each by itself before the best of them is dropped."""

AS_ESTIMATED = 0.5
"""Share of the estimated saving that a step of several units must show."""

SHARE_OF_ROUND = 0.5
"""Share of the bytes beyond the budget that is to go before the next walk."""

LEAST_SECONDS = 1e-9
"""Taken for repetitions that take no time, so that bytes per second are numbers."""

Profile: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""Bytes beyond the budget at each timestep, negative below it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit that could be dropped.

    Attributes:
        unit: which.
        changes: (from, to, bytes): timesteps ``[from, to)`` at which so many more bytes will be alive.
        saving: estimated bytes beyond the budget, summed over timesteps, that go; too large where less is
            beyond the budget than goes.
        seconds: estimated, of what would run again.
    """

    unit: int
    changes: tuple[tuple[Timestep, Timestep, Bytes], ...]
    saving: float
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.saving / max(self.seconds, LEAST_SECONDS)

    def saving_in(self, beyond: Profile) -> float:
        """Return the bytes beyond the budget that go."""
        low = min(start for start, _, _ in self.changes)
        high = max(end for _, end, _ in self.changes)
        before = beyond[low:high]
        after = before.copy()
        for start, end, size in self.changes:
            after[start - low : end - low] += size
        return float(np.maximum(before, 0).sum() - np.maximum(after, 0).sum())

    def apply(self, beyond: Profile) -> None:
        """Change the bytes beyond the budget."""
        for start, end, size in self.changes:
            beyond[start:end] += size


class Greedy:
    """Meets budgets on one step."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Note what each unit reads from outside."""
        self.evaluator = evaluator
        self._instance = evaluator.instance
        self._read = arrays_read(evaluator.instance)
        flat = evaluator.instance.flat
        stays = zip(flat.stay_arrays, flat.stay_from, flat.stay_until, strict=True)
        self._stays = {array: (gone, back) for array, gone, back in stays}

    def meet(
        self, start: Evaluated, budget_bytes: Bytes, most_seconds: Seconds, most_walks: int
    ) -> Evaluated:
        """Drop units until the budget is met, or nothing more helps, or it takes too much time.

        Args:
            start: valid states.
            budget_bytes: the peak to reach.
            most_seconds: of repetitions.
            most_walks: after which to stop.

        Returns:
            The states reached; their peak may be above the budget.
        """
        evaluator, evaluated = self.evaluator, start
        last_walk = evaluator.walks + most_walks
        useless: set[int] = set()
        while evaluated.evaluation.peak_bytes > budget_bytes and evaluator.walks < last_walk:
            evaluator.evaluate(evaluated.states)
            profile = np.array(
                evaluator.trace.timestep_bytes[: evaluated.evaluation.timesteps], dtype=np.int64
            )
            beyond = profile - budget_bytes
            room = most_seconds - evaluated.evaluation.extra_seconds
            ranked = [
                candidate
                for candidate in self.candidates(evaluated, budget_bytes)
                if candidate.unit not in useless and candidate.seconds <= room
            ]
            chosen = choose(ranked, beyond, room)
            if not chosen:
                break
            total = float(np.maximum(beyond, 0).sum())
            better = self._several(evaluated, chosen, total, budget_bytes, most_seconds)
            if better is None:
                better = self._one(evaluated, chosen, total, budget_bytes, most_seconds, useless)
            evaluated = evaluated if better is None else better
        return evaluated

    def candidates(self, evaluated: Evaluated, budget_bytes: Bytes) -> list[Candidate]:
        """Return the kept units that could be dropped.

        Args:
            evaluated: states, which the last walk must have been of.
            budget_bytes: above which bytes count.
        """
        trace, units = self.evaluator.trace, self._instance.units
        timesteps = evaluated.evaluation.timesteps
        above = [
            0,
            *accumulate(int(size_bytes > budget_bytes) for size_bytes in trace.timestep_bytes[:timesteps]),
        ]
        array_bytes = self._instance.flat.array_bytes
        result = []
        for unit, arrays in enumerate(units.arrays):
            if evaluated.states[unit] != KEPT:
                continue
            again = min(trace.first_late[array] for array in arrays)
            if again == NEVER:
                continue
            changes = [
                (start, end, -array_bytes[array])
                for array in arrays
                if trace.first_late[array] != NEVER and array_bytes[array]
                for start, end in self._spans(array, again)
                if start < end
            ]
            if any(above[end] > above[start] for start, end, _ in changes):
                lengthened, seconds = self._consequences(evaluated.states, unit, again)
                changes += [change for change in lengthened if above[change[1]] > above[change[0]]]
                saving = -sum(size * (above[end] - above[start]) for start, end, size in changes)
                if saving > 0:
                    result.append(Candidate(unit, tuple(changes), saving, seconds))
        return result

    def _spans(self, array: ArrayIndex, again: Timestep) -> list[tuple[Timestep, Timestep]]:
        """Return the timesteps at which an array lies there unread until it would be made again."""
        start = self.evaluator.trace.last_early[array] + 1
        if array not in self._stays:
            return [(start, again)]
        gone, back = (self.evaluator.trace.began[position] for position in self._stays[array])
        return [(start, gone), (back, again)]

    def _consequences(
        self, states: States, unit: int, again: Timestep
    ) -> tuple[list[tuple[Timestep, Timestep, Bytes]], Seconds]:
        """Estimate what a repetition at a timestep keeps alive, and the seconds that it takes."""
        trace, flat, units = self.evaluator.trace, self._instance.flat, self._instance.units
        lengthened: list[tuple[Timestep, Timestep, Bytes]] = []
        seconds = 0.0
        seen = {unit}
        todo = [unit]
        for repeated in todo:
            seconds += units.seconds[repeated]
            for array in self._read[repeated]:
                owner = flat.unit_of[array]
                if owner >= 0 and states[owner] != KEPT and trace.runs[owner] == 0:
                    if owner not in seen:
                        seen.add(owner)
                        todo.append(owner)
                    continue
                version = trace.current[array]
                first, last = trace.first[version], trace.last[version]
                if last < again:
                    lengthened.append((last + 1, again, trace.version_bytes[version]))
                elif first > again:
                    lengthened.append((again, first, trace.version_bytes[version]))
        return lengthened, seconds

    def _several(
        self,
        evaluated: Evaluated,
        chosen: Sequence[Candidate],
        beyond: float,
        budget_bytes: Bytes,
        most_seconds: Seconds,
    ) -> Evaluated | None:
        """Drop all that were chosen together, and half of them as often as the walk shows too little."""
        while len(chosen) > 1:
            better = self._dropped(evaluated, [candidate.unit for candidate in chosen])
            if better.evaluation.is_valid and better.evaluation.extra_seconds <= most_seconds:
                removed = beyond - self.evaluator.excess(better.evaluation, budget_bytes)
                if removed >= AS_ESTIMATED * sum(candidate.saving for candidate in chosen):
                    return better
            chosen = chosen[: len(chosen) // 2]
        return None

    def _one(
        self,
        evaluated: Evaluated,
        chosen: Sequence[Candidate],
        beyond: float,
        budget_bytes: Bytes,
        most_seconds: Seconds,
        useless: set[int],
    ) -> Evaluated | None:
        """Try the best few, and drop the one that removes most per second."""
        best, best_rate = None, 0.0
        for candidate in chosen[:TRIED_ALONE]:
            better = self._dropped(evaluated, [candidate.unit])
            removed = 0.0
            if better.evaluation.is_valid and better.evaluation.extra_seconds <= most_seconds:
                removed = beyond - self.evaluator.excess(better.evaluation, budget_bytes)
            if removed <= 0:
                useless.add(candidate.unit)
                continue
            seconds = better.evaluation.extra_seconds - evaluated.evaluation.extra_seconds
            if removed / max(seconds, LEAST_SECONDS) > best_rate:
                best, best_rate = better, removed / max(seconds, LEAST_SECONDS)
        return best

    def _dropped(self, evaluated: Evaluated, units: list[int]) -> Evaluated:
        states = list(evaluated.states)
        for unit in units:
            states[unit] = ONCE
        return Evaluated(states, self.evaluator.evaluate(states))


def choose(ranked: Sequence[Candidate], beyond: Profile, room: Seconds) -> list[Candidate]:
    """Return candidates that together remove much of what is beyond the budget, the best first.

    Args:
        ranked: all candidates.
        beyond: bytes beyond the budget.
        room: seconds that there are.

    Returns:
        With what they save one after the other; none if by these estimates the budget is out of reach.
    """
    beyond = beyond.copy()
    first = left = float(np.maximum(beyond, 0).sum())
    heap = [(-candidate.rate, candidate.unit, candidate) for candidate in ranked]
    heapq.heapify(heap)
    chosen: list[Candidate] = []
    seconds = 0.0
    while heap and left > (1 - SHARE_OF_ROUND) * first:
        _, unit, candidate = heapq.heappop(heap)
        looked_at = replace(candidate, saving=candidate.saving_in(beyond))
        if looked_at.saving <= 0:
            continue
        if heap and looked_at.rate < -heap[0][0]:
            heapq.heappush(heap, (-looked_at.rate, unit, looked_at))
            continue
        # All others save less a second.
        if seconds + left / looked_at.rate > room:
            return []
        seconds += looked_at.seconds
        left -= looked_at.saving
        looked_at.apply(beyond)
        chosen.append(looked_at)
    return chosen


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


def prune(evaluator: Evaluator, evaluated: Evaluated, budget_bytes: Bytes, most_walks: int) -> Evaluated:
    """Keep again what need not be dropped for a budget, the dearest first.

    Args:
        evaluator: of the step.
        evaluated: states within the budget.
        budget_bytes: the peak that may not be passed.
        most_walks: after which to stop.
    """
    last_walk = evaluator.walks + most_walks
    for unit in _could_be_kept(evaluator, evaluated, budget_bytes):
        if evaluator.walks >= last_walk:
            break
        states = list(evaluated.states)
        states[unit] = KEPT
        evaluation = evaluator.evaluate(states)
        if (
            evaluation.is_valid
            and evaluation.peak_bytes <= budget_bytes
            and evaluation.extra_seconds < evaluated.evaluation.extra_seconds
        ):
            evaluated = Evaluated(states, evaluation)
    return evaluated


def _could_be_kept(evaluator: Evaluator, evaluated: Evaluated, budget_bytes: Bytes) -> list[int]:
    """Return repeated units for whose arrays there is room until they are made again, the dearest first."""
    evaluator.evaluate(evaluated.states)
    trace, units = evaluator.trace, evaluator.instance.units
    array_bytes = evaluator.instance.flat.array_bytes
    profile = np.array(trace.timestep_bytes[: evaluated.evaluation.timesteps], dtype=np.int64)
    again: dict[ArrayIndex, Timestep] = {}
    for version in range(len(array_bytes), evaluated.evaluation.versions):
        if trace.last[version] > trace.first[version]:
            again.setdefault(trace.array[version], trace.first[version])
    result = []
    for unit, runs in enumerate(trace.runs):
        if not runs:
            continue
        room = [
            budget_bytes - int(profile[trace.last_early[array] + 1 : again[array]].max())
            >= array_bytes[array]
            for array in units.arrays[unit]
            if array in again and again[array] > trace.last_early[array] + 1
        ]
        if all(room):
            result.append(unit)
    return sorted(result, key=lambda unit: (-units.seconds[unit], unit))
