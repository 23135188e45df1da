"""The memory that all planned modules of a process share: one pool of buffers for each device."""

from olla_fx.run.pool.buffer_pool import BufferPool, pool_of
from olla_fx.run.pool.claim import Way
from olla_fx.run.pool.lease import Lease, Turn
from olla_fx.run.pool.segment import Range

__all__ = ["BufferPool", "Lease", "Range", "Turn", "Way", "pool_of"]
