"""What ordering works on: a problem as a flow of bytes, contracted, cut into pieces, and its minimum cuts."""
