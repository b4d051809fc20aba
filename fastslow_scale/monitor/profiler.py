"""A torch profiler trace of a few steps, and what they spent most time on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from fastslow_scale.config import Config
from fastslow_scale.monitor.run_monitor import NullMonitor
from fastslow_scale.parallel.mesh import Mesh

OPERATORS = 10


class Profiler:
    """Records the steps of `monitor.profile_steps` on every rank: RUN/profile/rank_N.pt.trace.json, for TensorBoard's
    profile plugin or https://ui.perfetto.dev."""

    def __init__(self, config: Config, run_dir: Path, mesh: Mesh, monitor: NullMonitor):
        self._first, self._last = config.monitor.profile_steps or (0, 0)
        self._path = run_dir / "profile" / f"rank_{mesh.rank}.pt.trace.json"
        self._on_gpu, self._monitor = mesh.device.type == "cuda", monitor
        self._profile: profile | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step."""
        if number == self._first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
        with record_function(f"step {number}") if self._profile else contextlib.nullcontext():
            yield
        if number == self._last and self._profile is not None:
            self._profile.stop()

    def write_after(self, number: int) -> None:
        """Write the trace after the last of its steps, which takes seconds."""
        if number == self._last and self._profile is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._monitor.message(f"profile of steps {self._first} to {self._last}: {self._path}")
            for line in top_operators(
                self._profile, "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
            ):
                self._monitor.message(line)
            self._profile = None


def top_operators(found: profile, key: str) -> list[str]:
    """The operators with the most time of their own: share, calls, name."""
    events = sorted(found.key_averages(), key=lambda event: getattr(event, key), reverse=True)
    total = sum(getattr(event, key) for event in events) or 1
    return [f"  {getattr(event, key) / total:6.1%}  {event.count:6}x  {event.key}" for event in events[:OPERATORS]]
