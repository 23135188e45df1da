"""Measures the memory that eager PyTorch needs for a step: the baseline of every plan.

There are two sources. *Recorded*: run the step, and record every thread's requests and frees in the CPU
allocator, kernels' workspaces included. *Dispatched*: run it on fake tensors, computing nothing, and note
under the dispatcher when storages are made and freed, as ``torch.distributed._tools.mem_tracker`` does. The
workspaces of its kernels remain unseen, unless they are known of the same operators in a recorded planned
run. Both give a stream of events, from which a model of the CUDA caching allocator computes reserved bytes
and fragmentation (OLLA §5.4).

Storages that existed before the step are static and not counted.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from olla_fx.arena.events import AllocationEvent, EventKind, record_events
from olla_fx.report.totals import Totals
from olla_fx.torch_compat import TorchDispatchMode, pytree
from olla_solvers.baselines.caching_allocator import CachingAllocatorModel

Signature = tuple[str, tuple[tuple[int, ...], ...]]
"""The kernel of an operator and the shapes of the tensors that it reads."""


class BaselineSource(enum.StrEnum):
    """The source of a baseline: a step that was run, or one followed on fake tensors."""

    RECORDED = "recorded"
    DISPATCHED = "dispatched"
    DISPATCHED_WITH_WORKSPACES = "dispatched, with recorded workspaces"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The memory that eager PyTorch needs for a step, beside static arrays.

    Attributes:
        live_peak_bytes: the maximum of bytes requested and not yet freed, sizes as requested.
        reserved_bytes: those that the CUDA caching allocator would reserve for this.
        fragmentation: share of it that is not in use at its peak (OLLA §5.4), 0 to 1.
        requests: the number of requested blocks of a byte or more.
        source: the source of the events; with workspaces unless it is ``DISPATCHED``.
        gradient_bytes: of the live peak, those of gradients, if the events tell.
        output_bytes: of the live peak, those of what the step returns, if the events tell.
    """

    live_peak_bytes: int
    reserved_bytes: int
    fragmentation: float
    requests: int
    source: BaselineSource
    gradient_bytes: int = 0
    output_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dictionary."""
        return {**asdict(self), "source": self.source.value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Baseline:
        """Read what :meth:`to_json` writes.

        Raises:
            ValueError: if a field is missing or invalid.
        """
        try:
            return cls(
                live_peak_bytes=int(document["live_peak_bytes"]),
                reserved_bytes=int(document["reserved_bytes"]),
                fragmentation=float(document["fragmentation"]),
                requests=int(document["requests"]),
                source=BaselineSource(document["source"]),
                gradient_bytes=int(document["gradient_bytes"]),
                output_bytes=int(document["output_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no baseline: {type(error).__name__}: {error}") from error


def eager_totals(
    alone: Baseline, measured: Baseline | None, *, static_bytes: int, old_gradient_bytes: int
) -> Totals:
    """Return what an eager step needs at its worst moment.

    Args:
        alone: without kernels' workspaces.
        measured: with them; None if they are not known.
        static_bytes: the caller's, alive all the time.
        old_gradient_bytes: of gradients that the step adds to, and so begins with.
    """
    allocator = measured or alone
    return Totals(
        static_bytes,
        alone.gradient_bytes + old_gradient_bytes,
        alone.output_bytes,
        alone.live_peak_bytes - alone.gradient_bytes - alone.output_bytes,
        None if measured is None else static_bytes + old_gradient_bytes + measured.live_peak_bytes,
        allocator.reserved_bytes,
        allocator.fragmentation,
    )


@dataclass(frozen=True, slots=True)
class StepResults:
    """The tensors that a step leaves to its caller, held until its measurement ends.

    Attributes:
        outputs: what it returns.
        gradients: what it accumulated for parameters, and for inputs that want a gradient.
    """

    outputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """A step that was followed under the dispatcher.

    Attributes:
        events: requests and frees of storages and workspaces, in order, without storages from before.
        workspaces: the blocks that are workspaces.
        gradients: the blocks that are gradients at the end.
        outputs: the blocks that are returned.
    """

    events: tuple[AllocationEvent, ...]
    workspaces: frozenset[int]
    gradients: frozenset[int]
    outputs: frozenset[int]

    def baseline(self, *, with_workspaces: bool = False) -> Baseline:
        """Measure the events.

        Args:
            with_workspaces: True to count the workspaces that the step was followed with.
        """
        if with_workspaces:
            events, source = self.events, BaselineSource.DISPATCHED_WITH_WORKSPACES
        else:
            events = tuple(event for event in self.events if event.block not in self.workspaces)
            source = BaselineSource.DISPATCHED
        return baseline_from_events(events, source, gradients=self.gradients, outputs=self.outputs)


def baseline_from_events(
    events: Iterable[AllocationEvent],
    source: BaselineSource = BaselineSource.RECORDED,
    *,
    gradients: frozenset[int] = frozenset(),
    outputs: frozenset[int] = frozenset(),
) -> Baseline:
    """Measure a stream of events.

    Args:
        events: requests and frees in order, of all threads.
        source: of the events.
        gradients: the blocks that are gradients.
        outputs: the blocks that the step returns.
    """
    model = CachingAllocatorModel()
    live_bytes = live_peak_bytes = requests = 0
    gradient_bytes = output_bytes = 0
    at_peak = gradient_bytes, output_bytes
    for event in events:
        sign = -1 if event.kind is EventKind.FREE else 1
        live_bytes += sign * event.size_bytes
        gradient_bytes += sign * event.size_bytes * (event.block in gradients)
        output_bytes += sign * event.size_bytes * (event.block in outputs)
        if event.kind is EventKind.FREE:
            model.free(event.block)
            continue
        model.allocate(event.block, event.size_bytes)
        requests += event.size_bytes > 0
        if live_bytes > live_peak_bytes:
            live_peak_bytes, at_peak = live_bytes, (gradient_bytes, output_bytes)
    return Baseline(live_peak_bytes, model.reserved_bytes, model.fragmentation, requests, source, *at_peak)


def record_baseline(step: Callable[[], object]) -> Baseline:
    """Run a step once and measure what it requests.

    Args:
        step: runs one eager step.

    Raises:
        ArenaUnavailableError: without the native allocator; :func:`dispatched_baseline` needs none.
    """
    with record_events() as recording:
        # Held until the recording ends: a step's results are alive at its end.
        results = step()
    del results
    return baseline_from_events(recording.events, BaselineSource.RECORDED)


def dispatched_baseline(step: Callable[[], object]) -> Baseline:
    """Follow a step that computes nothing, and measure what it would request.

    Args:
        step: runs one eager step on fake tensors; called once. It may enter its fake mode itself.
    """
    return follow_step(step).baseline()


def follow_step(
    step: Callable[[], object], workspaces: Mapping[Signature, int] = MappingProxyType({})
) -> FollowedStep:
    """Follow a step under the dispatcher.

    Args:
        step: runs one eager step, usually on fake tensors; called once. If it returns
            :class:`StepResults`, its gradients and outputs are told apart.
        workspaces: what operators request beside their results and free again, in bytes.
    """
    tracker = _StorageTracker(workspaces)
    with tracker:
        results = step()
    told = results if isinstance(results, StepResults) else StepResults(())
    gradients, outputs = tracker.blocks_of(told.gradients), tracker.blocks_of(told.outputs)
    events = tracker.finish()
    del results, told
    return FollowedStep(events, frozenset(tracker.workspaces), gradients, outputs - gradients)


def operator_signature(target: object, arguments: object) -> Signature:
    """Return what an operator's workspace depends on, equal for the forms of one kernel.

    Args:
        target: the operator: functional, in place, or one that also returns the statistics it updates.
        arguments: its positional ones.
    """
    packet = getattr(target, "overloadpacket", target)
    name = str(getattr(packet, "__name__", packet)).strip("_").removesuffix("_legit")
    leaves = pytree.tree_leaves(arguments)
    return name, tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when storages are made and freed.

    A storage among an operator's arguments is static unless an earlier operator made it. An unknown storage
    among its results is new. PyTorch keeps the Python object of a storage as long as the storage lives, so a
    weak reference to it reports the free. Storages are known by that object's identity, which may be used
    again only after that report.
    """

    def __init__(self, workspaces: Mapping[Signature, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspaces: list[int] = []
        self._workspace_bytes = workspaces
        self._blocks: dict[int, int] = {}
        self._events: list[AllocationEvent] = []
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._requests = 0
        self._finished = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; note the storages that it made."""
        if func is torch.ops.prim.device.default:  # asked for at every turn
            return func(*args)
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._know(storage, None)
        results = func(*args, **kwargs)
        for storage in _storages(results):
            if id(storage) not in self._known:
                self._note_request(storage)
        if self._workspace_bytes:
            self._note_workspace(self._workspace_bytes.get(operator_signature(func, args), 0))
        return results

    def blocks_of(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the blocks of tensors that are alive and were made by the step."""
        identities = (id(storage) for storage in _storages(tensors))
        return frozenset(self._blocks[identity] for identity in identities if identity in self._blocks)

    def finish(self) -> tuple[AllocationEvent, ...]:
        """Return the events; later ones are not noted."""
        self._finished = True
        self._known.clear()
        return tuple(self._events)

    def _note_request(self, storage: torch.UntypedStorage) -> None:
        self._blocks[id(storage)] = self._requests
        self._know(storage, self._request(storage.nbytes()))

    def _note_workspace(self, size_bytes: int) -> None:
        """Note a request of an operator that it frees itself, while arguments and results are alive."""
        if size_bytes:
            self.workspaces.append(self._requests)
            request = self._request(size_bytes)
            self._events.append(AllocationEvent(EventKind.FREE, request.block, size_bytes, True))

    def _request(self, size_bytes: int) -> AllocationEvent:
        request = AllocationEvent(EventKind.ALLOC, self._requests, size_bytes, on_planning_thread=True)
        self._requests += 1
        self._events.append(request)
        return request

    def _know(self, storage: torch.UntypedStorage, request: AllocationEvent | None) -> None:
        identity = id(storage)
        if identity in self._known:
            return

        def note_free(_: weakref.ref[torch.UntypedStorage]) -> None:
            if self._finished:
                return
            del self._known[identity]
            if request is not None:
                del self._blocks[identity]
                self._events.append(AllocationEvent(EventKind.FREE, request.block, request.size_bytes, True))

        self._known[identity] = weakref.ref(storage, note_free)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
