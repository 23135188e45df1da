"""Has the switches of the exact search, each with the proof that it keeps the smallest peak.

Notation: a state S is the set of operators that have run; live(S) is what is alive after them; B is the
peak that the search currently allows. S is *feasible* when its operators can be followed by all others
at costs up to B. live is submodular, ``live(P | Q) + live(P & Q) <= live(P) + live(Q)``: an array counts
once its producer has run (modular) and stops counting once all its consumers have (supermodular,
subtracted). All of this stays true when time runs backwards, where a state is what has been undone.

The search is its own; it raises the bound best first as IDA* does (Korf, "Depth-first
iterative-deepening", 1985).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchRules:
    """The rules that the search may use. Every combination finds the same smallest peak, at different speed.

    Attributes:
        contract: merge operators first; proofs in :mod:`olla_solvers.graph.contract`.
        split: cut at states that every order passes; proof in :mod:`olla_solvers.graph.split`.
        mincut: lift the bound by minimum cuts; proof in :mod:`olla_solvers.graph.minimum_cut`.
        projection: lift the bound by all sequences of a few operators; proof in
            :mod:`olla_solvers.order.projection`.
        closure: from S, run at once an operator v that fits under B and leaves no more alive. Proof: let a
            completion from S run v later, and move v to the front. By submodularity v lowers, or keeps,
            what is alive in every state that it is moved into, so no step between costs more; v's own
            step fits. So S is feasible only if S + v is.
        lazy: an operator v with ``kept(v) >= 0``, where kept(v) is the least that v can add to what is
            alive, is *lazy* when ``rise(v) <= kept(v) + rise(w)`` for all its direct successors w
            (backwards: ``rise(v) <= kept(w) + rise(w)``). It never branches; it runs just before its
            first successor. Proof: take a completion in which the other operators come as early as
            possible, and let w be the first that is not lazy. Of the lazy ones before w that w does not
            need, the last has its first successor behind w; moving it there lowers, or keeps, what the
            steps between see, its own step costs no more than that successor's by the condition, and w
            comes earlier: a contradiction. So just the lazy ancestors of w precede w. In any executable
            sequence each of them costs no more than a successor among them or w, hence than w.
        forward: search with time running forwards.
        backward: search with time running backwards; the costs of an order are the same read from its end.
        probe: now and then search right below the best known peak rather than from the bound, which finds
            better orders, or proves that there is none.
    """

    contract: bool = True
    split: bool = True
    mincut: bool = True
    projection: bool = True
    closure: bool = True
    lazy: bool = True
    forward: bool = True
    backward: bool = True
    probe: bool = True


ALL_RULES = SearchRules()
