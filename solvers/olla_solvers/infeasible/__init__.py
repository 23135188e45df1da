"""Why spans cannot fit within a capacity: the smallest set of them that already cannot."""
