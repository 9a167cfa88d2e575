"""What an engine counts, and what people read of it."""
