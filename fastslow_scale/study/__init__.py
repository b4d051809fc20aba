"""The question itself: what the theory says, checked by numbers."""
