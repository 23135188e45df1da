"""What no sequence can beat that may use the host: the least seconds beyond the step's own.

The bound of :mod:`olla_solvers.recomputation.bounds` gains a third way for what must be there after an
operator b's first run: it may wait on the host.

**Claim.** Let T be the seconds of the step without repetitions, and x those that a sequence within the budget
takes beyond them, for repetitions and stalls. Let c_b(x) be the most that

    min(out speed * u, in speed * (T + x - s_b - u))

can be, for s_b the seconds of b, and u, the seconds before b begins, at least those of b's ancestors, and at
most T + x less those of b and its descendants. Let L_b(m) be a bound on the seconds of repetitions if m bytes
may be kept at b's first run. Then x >= L_b(budget - own bytes of b + c_b(x)).

Where steps follow each other, all alike, and arrays are lent that may be elsewhere between steps, too, all of
them are among b's own bytes, and c_b(x) grows. Let A be the bytes of those that ancestors of b access, but
neither b nor descendants; D those that descendants do, but neither b nor ancestors; N those that only others
do; and S all that b does not access, but something does. In place of c_b(x) comes the least of c_b(x) + S, of
min(out speed, in speed) * (T + x - s_b), and of N and the most that both

    min(out speed * u + D, in speed * (T + x - s_b - u) + A)

and out speed * u + in speed * (T + x - s_b - u) can be.

**Proof.** Look at the sequence when b first runs. Of what is needed later, let K be there, H be away on the
host and copied in later, and the rest be made later. An array of H was copied out before b began, since its
memory is free, and none of its copy in had begun by b's end, since that memory is needed from the beginning
of the copy on. A direction of the link copies one array after the other, so the bytes of H are at most out
speed times the seconds before b begins, and in speed times those after b ends. Both together are the step's
T + x less s_b. All ancestors of b ran before and all descendants run after it. So H has at most c_b(x) bytes.
A sequence that kept H on the device, too, at b, but did all else the same would make the same things again
with at most c_b(x) more bytes there. L_b bounds its repetitions, which are part of x.

Of what is lent, at most S is away when b runs. Each array of it, and of H, is copied in after b has run in
one step, since it is accessed, and out before b runs in the next. From the end of the one run to the
beginning of the other are T + x - s_b, in which each direction copies no more than its speed allows. If an
ancestor of b accesses it, it is copied out between that and b, as H is; and if a descendant does, it is
copied in between b and that, as H is. So all that is away but D and N is copied out in the step's time before
b, and all but A and N is copied in in its time after b.

L_b(m) = g - p m for any price p of a byte, where g is what the minimum cut costs at that price. c_b grows
with x, so for each operator and price the inequality has a least solution, and the largest of these is the
bound. The certificate is the operator and the price, as before. At an infinite price it says that what
cannot be made again, and has no room, must be on the host. Budgets are impossible only where one operator's
arrays pass them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.bounds import Bounds, LowerBound, reachable
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds
from olla_solvers.swapping.transfers import Link

ROUNDS = 4
"""Times that the best operator and price are looked for, each time with what is proven before."""

LEAST_GAIN = 0.01
"""Share by which a round must raise the bound for another one to follow."""

FASTEST = 1e30
"""Bytes in a second for a direction that takes no time, with which nothing could be counted."""

HALVINGS = 60
"""Steps of the bisection that solves an inequality."""


def lower_bound_with_swaps(
    problem: RecomputationProblem, budget_bytes: Bytes, link: Link, *, deadline: float = math.inf
) -> LowerBound:
    """Return the least seconds beyond the step's own that any sequence within a budget needs with a link.

    Args:
        problem: the step; its order does not matter.
        budget_bytes: of planned arrays, workspaces and what is lent.
        link: which copies.
        deadline: ``time.monotonic()`` at which to stop with what is proven.

    Returns:
        The bound; its seconds are those of repetitions and stalls together.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    return BoundsWithHost(prepare(problem), link).lower_bound(budget_bytes, deadline)


class BoundsWithHost(Bounds):
    """Bounds of one step with a link, for any budgets."""

    def __init__(self, instance: Instance, link: Link) -> None:
        """Count the seconds that must lie before and after each operator, and what may be away there."""
        super().__init__(instance)
        sizes = instance.flat.repeated_bytes
        self._accessed = frozenset(array for arrays in instance.lent for array in arrays)
        accessed_bytes = sum(sizes[array] for array in self._accessed)
        self._idle_bytes = [
            accessed_bytes - sum(sizes[array] for array in arrays) for arrays in instance.lent
        ]
        self._alone = [
            alone - idle_bytes for alone, idle_bytes in zip(self._alone, self._idle_bytes, strict=True)
        ]
        self._out_speed = min(link.out_bytes_per_second, FASTEST)
        self._in_speed = min(link.in_bytes_per_second, FASTEST)
        self._spans: dict[OperatorIndex, tuple[Seconds, Seconds]] = {}
        self._around: dict[OperatorIndex, tuple[Bytes, Bytes, Bytes]] = {}
        self._extra_seconds = 0.0
        self._forced: dict[OperatorIndex, Seconds] = {}

    def lower_bound(self, budget_bytes: Bytes, deadline: float = math.inf) -> LowerBound:
        """Return the best bound found for a budget; see :func:`lower_bound_with_swaps`."""
        self._extra_seconds = 0.0
        self._forced = {}
        best = LowerBound(budget_bytes, 0.0, None, 0.0, 0)
        for _ in range(ROUNDS):
            bound = super().lower_bound(budget_bytes, deadline)
            best = replace(best, least_bytes=bound.least_bytes)
            if bound.is_impossible:
                return bound
            seconds = 0.0 if bound.operator is None else self._solved(bound)
            if seconds > best.extra_seconds:
                best = replace(bound, extra_seconds=seconds)
            if seconds <= (1 + LEAST_GAIN) * self._extra_seconds:
                break
            self._extra_seconds = seconds
        forced = max(self._forced, key=self._forced.__getitem__, default=None)
        if forced is not None and self._forced[forced] > best.extra_seconds:
            return replace(best, extra_seconds=self._forced[forced], operator=forced, price=math.inf)
        return best

    def host_bytes(self, operator: OperatorIndex, extra_seconds: Seconds) -> float:
        """Return the bytes that can be away at an operator's first run, at most.

        Args:
            operator: which.
            extra_seconds: that the step takes beyond its own.
        """
        before, after = self._seconds_around(operator)
        problem = self._instance.problem
        total = problem.step_seconds + extra_seconds - problem.seconds[operator]
        out_speed, in_speed = self._out_speed, self._in_speed
        earliest, latest = before, max(before, total - after)
        # Where both directions carry the same, or as near to that as b can be.
        best = min(max(total * (in_speed / (out_speed + in_speed)), earliest), latest)
        carried = min(out_speed * best, in_speed * (total - best))
        idle_bytes = self._idle_bytes[operator]
        if not idle_bytes:
            return carried
        only_before, only_after, neither = self._bytes_around(operator)
        best = (in_speed * total + only_before - only_after) / (out_speed + in_speed)
        best = min(max(best, earliest), latest)
        both = min(out_speed * best + only_after, in_speed * (total - best) + only_before)
        most = max(out_speed * seconds + in_speed * (total - seconds) for seconds in (earliest, latest))
        return float(min(carried + idle_bytes, min(both, most) + neither, min(out_speed, in_speed) * total))

    def _bytes_around(self, operator: OperatorIndex) -> tuple[Bytes, Bytes, Bytes]:
        """Return the bytes of what is lent, and accessed by others than an operator.

        Returns:
            Those accessed by ancestors and not by descendants, by these and not by those, and by neither.
        """
        if operator not in self._around:
            problem = self._instance.problem.problem
            is_before = reachable(operator, problem.predecessors)
            is_after = reachable(operator, problem.successors)
            only_before = only_after = neither = 0
            for array in self._accessed.difference(self._instance.lent[operator]):
                size_bytes, users = problem.arrays[array].size_bytes, problem.arrays[array].consumers
                before = any(is_before[user] for user in users)
                after = any(is_after[user] for user in users)
                only_before += size_bytes if before and not after else 0
                only_after += size_bytes if after and not before else 0
                neither += 0 if before or after else size_bytes
            self._around[operator] = only_before, only_after, neither
        return self._around[operator]

    def _room(self, operator: OperatorIndex, budget_bytes: Bytes) -> Bytes:
        host_bytes = math.ceil(self.host_bytes(operator, self._extra_seconds))
        return super()._room(operator, budget_bytes) + host_bytes

    def _least_bytes(self, operator: OperatorIndex, best: LowerBound, deadline: float) -> LowerBound:
        """Note the seconds in which what has no room, and is not made again, gets to the host."""
        kept_bytes = self._dearest(operator, deadline).kept_bytes
        needed_bytes = kept_bytes - super()._room(operator, best.budget_bytes)
        if operator not in self._forced:
            self._forced[operator] = self._seconds_for(operator, needed_bytes)
        return best

    def _seconds_for(self, operator: OperatorIndex, host_bytes: Bytes) -> Seconds:
        """Return the least seconds with which so many bytes can be away at an operator's first run."""
        if self.host_bytes(operator, 0.0) >= host_bytes:
            return 0.0
        speed = min(self._out_speed, self._in_speed)
        low, high = 0.0, 2 * host_bytes / speed
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.host_bytes(operator, middle) < host_bytes else (low, middle)
        return low

    def _solved(self, bound: LowerBound) -> Seconds:
        """Return the least seconds with which a certificate's inequality holds."""
        operator = bound.operator or 0
        constant = bound.extra_seconds + bound.price * self.host_bytes(operator, self._extra_seconds)
        low, high = 0.0, max(0.0, constant)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if middle + bound.price * self.host_bytes(operator, middle) < constant:
                low = middle
            else:
                high = middle
        return low

    def _seconds_around(self, operator: OperatorIndex) -> tuple[Seconds, Seconds]:
        """Return the seconds of an operator's ancestors, and of its descendants."""
        if operator not in self._spans:
            problem = self._instance.problem
            before, after = (
                sum(
                    seconds
                    for seconds, is_reached in zip(problem.seconds, reachable(operator, others), strict=True)
                    if is_reached
                )
                for others in (problem.problem.predecessors, problem.problem.successors)
            )
            own = problem.seconds[operator]
            self._spans[operator] = before - own, after - own
        return self._spans[operator]
