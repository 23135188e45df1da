"""What eager PyTorch needs for a step, recorded or followed on fake tensors: the yardstick of every plan."""
