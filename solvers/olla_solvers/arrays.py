"""The parts of a dataflow graph: operators, and the arrays that they make and read.

An array is one storage with one producer and any number of consumers, so the array, and not an edge, carries
the size. Arrays refer to operators by index; names serve messages and files.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

Bytes: TypeAlias = int
Timestep: TypeAlias = int
Offset: TypeAlias = int
OperatorIndex: TypeAlias = int


class ArrayKind(enum.StrEnum):
    """Who owns an array's memory.

    ``PLANNED`` arrays live in the buffer, ``STATIC`` ones belong to the caller and are alive all the
    time, ``OUTPUT`` ones are made by the step and given to the caller, outside the buffer. ``HOST`` arrays
    are copies that wait in a buffer of their own, in the host's memory.
    """

    PLANNED = "planned"
    STATIC = "static"
    OUTPUT = "output"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Operator:
    """One computation.

    Attributes:
        name: unique in its problem.
        workspace_bytes: bytes that live and die inside this operator, beside its inputs and outputs.
    """

    name: str
    workspace_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Array:
    """One storage.

    Attributes:
        name: unique in its problem.
        size_bytes: size, already rounded up to the device's alignment.
        producer: index of the operator that makes it; None only for static arrays.
        consumers: indices of the operators that read it, ascending, without repetition.
        kind: who owns its memory.
        alignment: the offset must be a multiple of this many bytes.
    """

    name: str
    size_bytes: Bytes
    producer: OperatorIndex | None
    consumers: tuple[OperatorIndex, ...] = ()
    kind: ArrayKind = ArrayKind.PLANNED
    alignment: int = 1
