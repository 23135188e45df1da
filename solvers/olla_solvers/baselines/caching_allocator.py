"""Models PyTorch's CUDA caching allocator: the bytes it reserves for a stream of requests and frees.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings and one stream: sizes
are rounded up to 512 B; requests of up to 1 MiB share segments of 2 MiB, larger ones segments of 20 MiB, and
from 10 MiB on each asks for a segment of its own, rounded up to 2 MiB; the smallest sufficient free block
serves, at the lowest address among equals, and is split if enough remains; a freed block merges with its
free neighbours. Segments are never returned.

Fragmentation is OLLA §5.4's: ``(MR - RS) / MR``, with MR the bytes reserved and RS the bytes in use, at the
moment when MR reaches its peak.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from olla_solvers.plan import Span
from olla_solvers.problem import Offset

MIB = 2**20
ROUNDING_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB


def round_up(size_bytes: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the size."""
    return -(-size_bytes // multiple) * multiple


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment; the parts of one segment are linked in the order of their addresses."""

    address: int
    size_bytes: int
    pool: _Pool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks that serve one class of requests.

    Attributes:
        smallest_remainder: a block is split if at least this much of it remains.
        sizes: (size, address) of the free blocks, ascending.
    """

    smallest_remainder: int
    sizes: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        """Offer a block."""
        block.is_free = True
        bisect.insort(self.sizes, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        """Withdraw a block."""
        block.is_free = False
        del self.sizes[bisect.bisect_left(self.sizes, (block.size_bytes, block.address))]
        del self.blocks[block.address]

    def take_best_fit(self, size_bytes: int) -> _Block | None:
        """Withdraw the smallest sufficient block, the lowest among equals."""
        position = bisect.bisect_left(self.sizes, (size_bytes, 0))
        if position == len(self.sizes):
            return None
        _, address = self.sizes.pop(position)
        block = self.blocks.pop(address)
        block.is_free = False
        return block


class CachingAllocatorModel:
    """Serves requests as the CUDA caching allocator would, and counts.

    Attributes:
        allocated_bytes: rounded bytes of live blocks, as ``torch.cuda.memory_allocated`` counts.
        allocated_peak_bytes: its maximum so far.
        reserved_bytes: bytes of all segments; never falls.
        allocated_at_reserved_peak_bytes: ``allocated_bytes`` when the last segment was reserved.
    """

    def __init__(self) -> None:
        """Start with nothing reserved."""
        self.allocated_bytes = 0
        self.allocated_peak_bytes = 0
        self.reserved_bytes = 0
        self.allocated_at_reserved_peak_bytes = 0
        self._small = _Pool(smallest_remainder=ROUNDING_BYTES)
        self._large = _Pool(smallest_remainder=SMALL_REQUEST_BYTES + 1)
        self._live: dict[int, _Block] = {}

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that was not in use when the last segment was reserved."""
        if self.reserved_bytes == 0:
            return 0.0
        return 1 - self.allocated_at_reserved_peak_bytes / self.reserved_bytes

    @property
    def free_blocks(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of every free block, by address."""
        pools = (self._small, self._large)
        return tuple(sorted((address, size) for pool in pools for size, address in pool.sizes))

    def allocate(self, identity: int, size_bytes: int) -> int:
        """Serve a request.

        Args:
            identity: names the block until it is freed.
            size_bytes: what is asked for; a request of nothing takes nothing.

        Returns:
            The address, in a space where segments follow each other.

        Raises:
            ValueError: if a block of this identity is live, or the size is negative.
        """
        if identity in self._live:
            raise ValueError(f"block {identity} is requested again before it is freed")
        if size_bytes < 0:
            raise ValueError(f"block {identity} has a negative size ({size_bytes} B)")
        if size_bytes == 0:
            return 0
        rounded = round_up(size_bytes, ROUNDING_BYTES)
        pool = self._small if rounded <= SMALL_REQUEST_BYTES else self._large
        free = pool.take_best_fit(rounded)
        block = free or self._reserve(pool, rounded)
        self._split(block, rounded)
        self._live[identity] = block
        self.allocated_bytes += block.size_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        if free is None:
            self.allocated_at_reserved_peak_bytes = self.allocated_bytes
        return block.address

    def free(self, identity: int) -> None:
        """Take a block back; one that is not live (or was of no bytes) is ignored."""
        block = self._live.pop(identity, None)
        if block is None:
            return
        self.allocated_bytes -= block.size_bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                block.pool.remove(neighbour)
                _merge(block, neighbour)
        block.pool.add(block)

    def _reserve(self, pool: _Pool, size_bytes: int) -> _Block:
        if pool is self._small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size_bytes < OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = round_up(size_bytes, OWN_SEGMENT_ROUNDING_BYTES)
        segment = _Block(self.reserved_bytes, segment_bytes, pool)
        self.reserved_bytes += segment_bytes
        return segment

    def _split(self, block: _Block, size_bytes: int) -> None:
        """Cut a block to size, if what remains is worth keeping; else it is used whole."""
        remaining = block.size_bytes - size_bytes
        if remaining < block.pool.smallest_remainder:
            return
        rest = _Block(block.address + size_bytes, remaining, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size_bytes = size_bytes
        block.pool.add(rest)


def _merge(block: _Block, neighbour: _Block) -> None:
    """Let a block absorb the one beside it."""
    block.size_bytes += neighbour.size_bytes
    if neighbour is block.before:
        block.address = neighbour.address
        block.before = neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block


def replay(spans: Sequence[Span]) -> tuple[Offset, ...]:
    """Return the offsets that the allocator would give spans, requested and freed in the sequence of time.

    It knows no given offsets and no alignment above 512 B. Spans with a given offset stay there, and its
    segments begin above them; a span with a larger alignment asks for so much more that an aligned offset
    lies within its block.

    Args:
        spans: rectangles; deaths come before births at equal times, births in the given sequence.

    Returns:
        An offset for each span.
    """
    tops = (span.offset + span.size_bytes for span in spans if span.offset is not None)
    coarsest = max((span.alignment for span in spans), default=1)
    base = round_up(round_up(max(tops, default=0), ROUNDING_BYTES), coarsest)
    model = CachingAllocatorModel()
    offsets = [span.offset or 0 for span in spans]
    free = [index for index, span in enumerate(spans) if span.offset is None]
    births = [(spans[index].lower, 1, index) for index in free]
    deaths = [(spans[index].upper, 0, index) for index in free]
    for _, is_birth, index in sorted(births + deaths):
        if not is_birth:
            model.free(index)
            continue
        span = spans[index]
        padding = 0 if ROUNDING_BYTES % span.alignment == 0 else span.alignment - 1
        address = model.allocate(index, span.size_bytes + padding if span.size_bytes else 0)
        offsets[index] = round_up(base + address, span.alignment)
    return tuple(offsets)
