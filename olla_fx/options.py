"""The options of planning and running a step, checked once."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olla_fx.host_link import link_of
from olla_fx.memory_budget import MemoryBudget
from olla_fx.rewrites import REWRITES
from olla_fx.swap_request import SwapRequest
from olla_solvers.errors import OptionError, SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.swapping.transfers import Link

RECOMPUTE = 0.01
"""Of a step's time, what recomputation may take unless the user says otherwise: less than can be measured."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of planning and running a step.

    Attributes:
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the integer programs of ordering and placing really
            run), or ``none``.
        time_limit: seconds of ordering and placing, to go on to a proof: one limit for all plans that a call
            makes (``optimize``, ``plan``, a call of the step, a backward). Capturing is not counted; it takes
            the same time whatever the limit. Nor is choosing what a memory budget needs, which has half as
            long, or five seconds if that is more. None: each plan for as long as enough can still be
            gained, at most about 9 s of processor time.
        return_outputs: of a whole training step: return ``(loss, outputs)`` instead of the loss.
        accumulation_steps: of a whole training step: cut the batch along its first dimension into so many
            micro-batches, whose gradients accumulate; the loss is the mean of theirs.
        clip_grad_norm: of a whole training step: scale the trained parameters' gradients down to this norm.
        clip_grad_value: of a whole training step: limit each element of the gradients to this magnitude.
        fallback: ``eager``: a new kind of call is run by the model itself until it comes again, and so is one
            that cannot be planned, with one warning; ``raise``: every new kind is planned when it first
            comes, and what cannot be planned is an error. What ``optimize`` is called for is always planned.
        cache_size_limit: how many plans to keep: one for each kind of call, shapes of inputs mostly.
        cuda_graph: launch the settled step as one CUDA graph. A graph bakes Python's numbers, so optimizers
            other than SGD need ``capturable=True`` and a tensor as learning rate. If capturing fails, the
            step runs without one and says why.
        rewrites: ``all``, ``none``, or names among :data:`olla_fx.REWRITES`: rewrites of the step that let
            backward keep less, with the same bits. Where they do not pay, the step is planned without.
            Results are written over arguments with ``none``, too.
        recompute: the share of the step's time that may be spent on computing again, in backward, what would
            else be kept since forward, with the same bits: 0.01 is one per cent; 0 keeps everything. None:
            one per cent without a memory budget, with one as much as it needs.
        memory_budget: what the step may need beside static arrays, that is the buffer, the outputs, and
            gradients that it makes outside the buffer: bytes, text (``"8GiB"``), or a share of what it needs
            without recomputation (``0.6``, ``"60%"``; none in inference). Backward then computes again as
            much as that takes, and no more. If no plan is found within it, :class:`olla_fx.BudgetError` says
            what is. It holds once a plan is settled: recorded runs come before that.
        memory_budget_includes: ``"static"``: static arrays (parameters, state, inputs) count, too.
        loss_chunks: compute the last linear layer and a cross entropy of its outputs, forward and backward,
            in so many chunks, if that lowers the peak: logits are then never all there at once. It takes one
            product of the layer more, or two in a loop of your own. Bits are eager's where the device's
            kernels and the types allow it; elsewhere the weight's gradient is added up over chunks, and the
            report says that last bits may differ. None keeps the loss whole.
        swap: within a memory budget, let arrays wait in the host's memory where that is faster than to
            compute them again: ``True``, ``False``, or ``"auto"``, which does so on CUDA (but not with
            ``cuda_graph``), and elsewhere if ``link`` is given. (A
            :class:`~olla_fx.swap_request.SwapRequest` has a choice of its own, without a budget.)
        link: how fast arrays are copied to the host and back: ``"16GB/s"``, bytes in a second, or a pair of
            these. None: measured, on CUDA. On a CPU, where host and device are one and nothing is gained,
            threads copy as slowly as it says, to try it out.
        dynamic: False makes a plan for each size of the inputs; None plans for all sizes once one varies;
            True does so at once, as far as the model allows it, which takes more time for the first plan.
            Numbers that the model asks of its inputs, such as how many labels there are, are sizes, too, once
            one varies.

    Raises:
        OptionError: if a value makes no sense.
        SolverUnavailableError: if the solver is unknown or not installed, or its licence is too small for
            steps with a memory budget.
    """

    solver: str = "auto"
    time_limit: float | None = None
    return_outputs: bool = False
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    fallback: str = "eager"
    cache_size_limit: int = 8
    cuda_graph: bool = False
    dynamic: bool | None = None
    rewrites: str | Collection[str] = "all"
    recompute: float | None = None
    loss_chunks: int | None = None
    memory_budget: int | float | str | None = None
    memory_budget_includes: str | None = None
    swap: bool | str | SwapRequest = "auto"
    link: int | float | str | Sequence[int | float | str] | Link | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        backends.check_options(self.solver, self.time_limit)
        for name in ("accumulation_steps", "cache_size_limit"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise OptionError(f"{name} is a whole number of at least 1, not {count!r}")
        if self.fallback not in ("eager", "raise"):
            raise OptionError(f"fallback is 'eager' or 'raise', not {self.fallback!r}")
        for name in ("clip_grad_norm", "clip_grad_value"):
            limit = getattr(self, name)
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (is_number and limit > 0):
                raise OptionError(f"{name} is a number above 0 or None, not {limit!r}")

        if self.dynamic not in (None, True, False):
            raise OptionError(f"dynamic is True, False or None, not {self.dynamic!r}")

        object.__setattr__(self, "rewrites", _names_of_rewrites(self.rewrites))
        _check_loss_chunks(self.loss_chunks, self.rewrites)
        _check_recompute(self.recompute)
        self._check_budget()
        self._check_swap()

    def _check_swap(self) -> None:
        if not isinstance(self.swap, bool | SwapRequest) and self.swap != "auto":
            raise OptionError(f"swap is True, False or 'auto', not {self.swap!r}")
        if self.cuda_graph and self.asks_to_swap:
            raise OptionError(
                "cuda_graph=True with swap: a captured graph would hold on to memory of the host that each "
                "run takes and gives back. Leave one of them out"
            )
        if isinstance(self.swap, SwapRequest):
            if self.memory_budget is not None or self.link is not None:
                raise OptionError("a SwapRequest has its own link, and no memory_budget: leave both out")
        elif self.swap is True and self.memory_budget is None:
            raise OptionError("swap=True says how a memory budget may be kept: give memory_budget, too")
        if self.link is not None:
            link_of(self.link)
            if self.memory_budget is None or self.swap is False:
                raise OptionError(
                    "link says how fast arrays are swapped, which is done within a memory_budget: give that, "
                    "and leave swap=False out"
                )

    @property
    def asks_to_swap(self) -> bool:
        """Return True if arrays are to wait in the host's memory, by ``swap`` or ``link``."""
        return self.swap is True or isinstance(self.swap, SwapRequest) or self.link is not None

    def _check_budget(self) -> None:
        if self.budget is not None and self.recompute is not None:
            raise OptionError(
                "memory_budget says how much memory there is and recompute how much time: give one of them"
            )
        if self.memory_budget_includes not in (None, "static"):
            raise OptionError(
                f"memory_budget_includes is 'static' or None, not {self.memory_budget_includes!r}"
            )
        if self.memory_budget_includes is not None and self.memory_budget is None:
            raise OptionError("memory_budget_includes says what counts in memory_budget, which is not given")
        if self.budget is not None and self.solver == "gurobi" and not backends.takes_any_size(self.solver):
            raise SolverUnavailableError(
                "memory_budget with solver='gurobi' needs a Gurobi licence for any size of model: steps "
                "that compute again are larger than what the one that comes with pip takes "
                f"({backends.FREE_GUROBI_SIZE:,} variables). Give solver='highs' or 'cbc', or install one"
            )

    @property
    def budget(self) -> MemoryBudget | None:
        """The memory budget as it was read; None if there is none."""
        return None if self.memory_budget is None else MemoryBudget.of(self.memory_budget)

    @property
    def recompute_share(self) -> float:
        """The share of the step's time that recomputation may take without a budget."""
        return RECOMPUTE if self.recompute is None else self.recompute

    @property
    def may_recompute(self) -> bool:
        """Return True if backward may compute anything again."""
        return self.memory_budget is not None or self.recompute_share > 0

    @property
    def asks_for_seconds(self) -> bool:
        """Return True if operators' time matters to what is planned."""
        return self.may_recompute or self.asks_to_swap

    @property
    def changes_gradients(self) -> bool:
        """Return True if gradients are accumulated or clipped before the update."""
        return (
            self.accumulation_steps > 1 or self.clip_grad_norm is not None or self.clip_grad_value is not None
        )


def _names_of_rewrites(given: object) -> tuple[str, ...]:
    """Return the names of the rewrites that an option chooses."""
    if given in ("all", "none"):
        return REWRITES if given == "all" else ()
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Collection) or any(name not in REWRITES for name in names):
        raise OptionError(f"rewrites is 'all', 'none', or some of {', '.join(REWRITES)}, not {given!r}")
    return tuple(name for name in REWRITES if name in names)


def _check_recompute(share: Any) -> None:
    if share is None:
        return
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 <= share < math.inf:
        raise OptionError(f"recompute is a share of the step's time, such as 0.01, or 0, not {share!r}")


def _check_loss_chunks(count: object, rewrites: Collection[str]) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise OptionError(f"loss_chunks is a whole number of at least 2 or None, not {count!r}")
    if "chunked_loss" not in rewrites:
        raise OptionError(f"loss_chunks={count} needs the rewrite chunked_loss, which rewrites leaves out")


def changed_options(options: Options | None, changes: Mapping[str, Any]) -> Options:
    """Return options with some of their values changed.

    Args:
        options: what to start from; None for the defaults.
        changes: new values by name.

    Raises:
        OptionError: if there is no option of such a name, or a value makes no sense.
        SolverUnavailableError: if the solver is unknown or not installed.
    """
    names = [field.name for field in dataclasses.fields(Options)]
    for name in changes:
        if name not in names:
            similar = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else f": one of {', '.join(names)}"
            raise OptionError(f"there is no option {name!r}{hint}")
    if options is not None and not isinstance(options, Options):
        raise OptionError(f"options is an olla_fx.Options, not a {type(options).__name__}")
    return dataclasses.replace(options or Options(), **changes)
