"""Fast-slow language models: a tensor-parallel fast path, a replicated slow path, trained under DeepSpeed ZeRO."""
