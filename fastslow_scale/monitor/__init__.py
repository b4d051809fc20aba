"""What a run tells: metrics.jsonl, TensorBoard, the console."""

from fastslow_scale.monitor.console import print_summary
from fastslow_scale.monitor.metrics import read_metrics
from fastslow_scale.monitor.run_monitor import Monitor, NullMonitor

__all__ = ["Monitor", "NullMonitor", "print_summary", "read_metrics"]
