"""What the papers describe and the default path does not need: for their tables and for comparison."""
