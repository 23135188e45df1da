"""Has the switches of the integer programs: techniques of OLLA's section 4, and two of our own.

Each can be turned off by itself, so that what it is worth can be measured
(``examples/benchmarks/ordering_techniques.py``). All of them keep the smallest peak. Early weight updates
(Functions 3 and 4) change the graph, not the program: :mod:`olla_solvers.paper.early_updates`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Techniques:
    """The techniques by which the integer programs of equations 9 and 14 are stated.

    One operator runs at a timestep, whatever the switches: fewer timesteps than operators lose optimality.

    Attributes:
        spans: equation 10. An operator gets columns only between its earliest and latest timestep. Off: at
            every timestep.
        useful_lifetimes: equation 11, MUL. An array may be preserved only between its producer's earliest
            and its consumers' latest timestep. Off: at every timestep.
        preserved: equation 12, PRES. Preservation is a constant 1 from the producer's latest to the last
            consumer's earliest timestep. Off: a column.
        precedence: Function 2, reachability, in bitsets for all pairs at once. An operator's earliest
            timestep is its number of ancestors, as these all run before it, and one operator runs at a
            timestep; off: the longest distance to an input, as in equation 10. In the joint program, pairs of
            arrays that are never alive together get no rows, and pairs that always meet are told so.
        shared_outputs: equation 5 by construction: one column says when an operator runs and creates all its
            arrays. Off: a column for each array, tied by rows of equation 5; Function 1 then meets an
            operator several times, and its duplicates are removed.
        resident_sets: equation 13 in the joint program, too: no buffer is smaller than what is alive at
            once. It follows from equations 6 to 8, but not from their linear relaxation.
        contract: merge operators first; proofs in :mod:`olla_solvers.graph.contract`. The joint program
            never does: merging keeps the peak, not the addresses.
        pieces: one program for each piece between states that all orders pass; proof in
            :mod:`olla_solvers.graph.split`. Not in the joint program, either.
    """

    spans: bool = True
    useful_lifetimes: bool = True
    preserved: bool = True
    precedence: bool = True
    shared_outputs: bool = True
    resident_sets: bool = True
    contract: bool = True
    pieces: bool = True


ALL_TECHNIQUES = Techniques()

LITERAL = Techniques(*(False,) * 8)
"""Equation 14 word for word: nothing contracted, every operator and array at every timestep."""
