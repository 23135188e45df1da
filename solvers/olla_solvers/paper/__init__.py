"""The papers' methods that the default path does not need: for their tables and for comparison."""
