"""What a run would need and take, from its config alone: memory, bytes, seconds, and the best layout."""
