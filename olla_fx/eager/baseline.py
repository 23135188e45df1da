"""Measures the memory that eager PyTorch needs for a step: the baseline of every plan.

There are two sources. *Recorded*: run the step, and record every thread's requests and frees in the CPU
allocator, kernels' workspaces included. *Dispatched*: run it on fake tensors, computing nothing, and note
under the dispatcher when storages are made and freed, as ``torch.distributed._tools.mem_tracker`` does;
workspaces of kernels remain unseen. Both give a stream of events, from which a model of the CUDA caching
allocator computes reserved bytes and fragmentation (OLLA §5.4).

Storages that existed before the step are static and not counted.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from olla_fx.arena.events import AllocationEvent, EventKind, record_events
from olla_fx.torch_compat import TorchDispatchMode, pytree
from olla_solvers.baselines.caching_allocator import CachingAllocatorModel


class BaselineSource(enum.StrEnum):
    """The source of a baseline: a step that was run, or one followed on fake tensors."""

    RECORDED = "recorded"
    DISPATCHED = "dispatched"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The memory that eager PyTorch needs for a step, beside static arrays.

    Attributes:
        live_peak_bytes: the maximum of bytes requested and not yet freed, sizes as requested.
        reserved_bytes: those that the CUDA caching allocator would reserve for this.
        fragmentation: share of it that is not in use at its peak (OLLA §5.4), 0 to 1.
        requests: the number of requested blocks of a byte or more.
        source: the source of the events.
    """

    live_peak_bytes: int
    reserved_bytes: int
    fragmentation: float
    requests: int
    source: BaselineSource

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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no baseline: {type(error).__name__}: {error}") from error


def baseline_from_events(
    events: Iterable[AllocationEvent], source: BaselineSource = BaselineSource.RECORDED
) -> Baseline:
    """Measure a stream of events.

    Args:
        events: requests and frees in order, of all threads.
        source: of the events.
    """
    model = CachingAllocatorModel()
    live_bytes = live_peak_bytes = requests = 0
    for event in events:
        if event.kind is EventKind.FREE:
            model.free(event.block)
            live_bytes -= event.size_bytes
        else:
            model.allocate(event.block, event.size_bytes)
            live_bytes += event.size_bytes
            live_peak_bytes = max(live_peak_bytes, live_bytes)
            requests += event.size_bytes > 0
    return Baseline(live_peak_bytes, model.reserved_bytes, model.fragmentation, requests, source)


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
    return baseline_from_events(dispatched_events(step), BaselineSource.DISPATCHED)


def dispatched_events(step: Callable[[], object]) -> tuple[AllocationEvent, ...]:
    """Follow a step under the dispatcher.

    Args:
        step: runs one eager step, usually on fake tensors; called once.

    Returns:
        Requests and frees of storages, in order, without storages from before the step.
    """
    tracker = _StorageTracker()
    with tracker:
        results = step()
    events = tracker.finish()
    del results
    return events


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when storages are made and freed.

    A storage among an operator's arguments is static unless an earlier operator made it. An unknown storage
    among its results is new. PyTorch keeps the Python object of a storage as long as the storage lives, so a
    weak reference to it reports the free. Storages are known by that object's identity, which may be used
    again only after that report.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._know(storage, None)
        results = func(*args, **kwargs)
        for storage in _storages(results):
            if id(storage) not in self._known:
                self._note_request(storage)
        return results

    def finish(self) -> tuple[AllocationEvent, ...]:
        """Return the events; later ones are not noted."""
        self._finished = True
        self._known.clear()
        return tuple(self._events)

    def _note_request(self, storage: torch.UntypedStorage) -> None:
        request = AllocationEvent(EventKind.ALLOC, self._requests, storage.nbytes(), on_planning_thread=True)
        self._requests += 1
        self._events.append(request)
        self._know(storage, request)

    def _know(self, storage: torch.UntypedStorage, request: AllocationEvent | None) -> None:
        identity = id(storage)
        if identity in self._known:
            return

        def note_free(_: weakref.ref[torch.UntypedStorage]) -> None:
            if self._finished:
                return
            del self._known[identity]
            if request is not None:
                self._events.append(AllocationEvent(EventKind.FREE, request.block, request.size_bytes, True))

        self._known[identity] = weakref.ref(storage, note_free)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
