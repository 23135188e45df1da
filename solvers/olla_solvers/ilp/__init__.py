"""Integer linear programs of ordering and placement, and the solvers that run them."""
