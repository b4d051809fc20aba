"""From text to batches: tokenizer, shards, index, order and stream. Knows nothing of the model."""
