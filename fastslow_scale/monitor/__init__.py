"""What a run tells: metrics.jsonl, TensorBoard, the console."""
