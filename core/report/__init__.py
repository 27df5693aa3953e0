"""What became of each operator, and what it costs."""
