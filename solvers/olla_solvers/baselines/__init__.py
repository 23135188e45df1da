"""Planners of others to compare with: allocators and reordering heuristics of PyTorch."""
