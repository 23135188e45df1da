"""A step as a game of one player, who swaps or removes arrays as it runs until it fits a memory limit.

This is the environment of S. Chen, "GPU Memory Management for Neural Networks using Deep Q-Network"
(sections 4.2 to 4.8). A step's operations on memory are the nodes
(:mod:`~olla_solvers.swapping.environment.operations`); at each of them the player copies an array to the
host, removes one that will be computed again, or does nothing
(:class:`~olla_solvers.swapping.environment.environment.Environment`). When to copy back and to compute again
follows from that (:mod:`~olla_solvers.swapping.environment.timetable`). Rewards are simulated seconds.

Who plays is left open; one player is ``olla_fx.deep_q``.
"""
