"""Trades time for memory: which arrays are dropped after forward, and when they are made again.

A step in a fixed order, the seconds of its operators and what may run a second time go in
(:class:`~olla_solvers.recomputation.problem.RecomputationProblem`); a longer sequence of operators comes out
(:class:`~olla_solvers.recomputation.problem.Recomputation`), whose peak is lower.
"""
