"""The training loop, its engine and its checkpoints."""
