"""Measures what eager PyTorch needs for a step, recorded or on fake tensors: the baseline of every plan."""
