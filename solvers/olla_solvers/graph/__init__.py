"""Graphs as ordering sees them: flows of bytes, contracted, cut into pieces, and their minimum cuts."""
