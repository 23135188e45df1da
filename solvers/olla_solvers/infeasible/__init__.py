"""Finds why spans cannot fit within a capacity: an irreducible infeasible subset."""
