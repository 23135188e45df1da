"""Planners of others, on the same problem and counted by the same rules, to compare with.

Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016); what ``torch.compile`` does for
``activation_memory_budget``; and an integer program over retention intervals, in the manner of Checkmate
(Jain et al., 2020) and Moccasin (Bartan et al., 2023), which proves how much better any plan could be.
:mod:`~olla_solvers.recomputation.published.methods` lists them by name.
"""
