"""Wraps what PyTorch keeps private about tracing: fake tensors, symbols, operators, and the graph itself."""
