"""Limits what a search may spend: its time, its memory, and the processes it may use."""
