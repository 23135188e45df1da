"""Writes a plan out as graphs that run: operators in planned order, and the code that calls them."""
