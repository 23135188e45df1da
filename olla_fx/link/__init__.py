"""Copies arrays of a running step to the host's memory and back, beside what computes.

:mod:`~olla_fx.link.operators` are the operators of a graph: a copy begins at one and is waited for at
another. They act on the :class:`~olla_fx.link.session.Session` of the run that they are a part of, which has
its memory from :mod:`~olla_fx.link.host_memory` and lets :mod:`~olla_fx.link.engines` copy: a stream for each
direction on CUDA, and on a CPU a thread for each, which may be slowed down as a link would be.
"""

from olla_fx.link.engines import CopyEngines, engines_for
from olla_fx.link.host_memory import HostMemory, poison_host_memory
from olla_fx.link.operators import (
    is_transfer,
    offload,
    offload_wait,
    reload,
    reload_wait,
    waits_for,
)
from olla_fx.link.session import Session
from olla_fx.link.speed import link_for

__all__ = [
    "CopyEngines",
    "HostMemory",
    "Session",
    "engines_for",
    "is_transfer",
    "link_for",
    "offload",
    "offload_wait",
    "poison_host_memory",
    "reload",
    "reload_wait",
    "waits_for",
]
