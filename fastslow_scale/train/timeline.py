"""Where the time of one training step goes: every moment belongs to one part, so that the parts add up to the step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")


class Timeline:
    """`with timeline.measuring(): ...` measures one step; outside of it `part` costs nothing.

    A part inside another one interrupts it. Waiting for a collective is `communication` wherever it happens. On a GPU
    the marks are events in the current stream, which are read once the step has been waited for: `communication` is
    then what computation waits for, not what overlaps with it.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str, Any, Any]] = []
        self._since: Any = None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One of PARTS."""
        if not self._open:
            yield
            return
        self._turn_to(name)
        try:
            yield
        finally:
            self._turn_back()

    @contextlib.contextmanager
    def measuring(self, wanted: bool = True) -> Iterator[None]:
        """Measure what happens inside, if it is wanted; what no part claims is `other`."""
        if not wanted:
            yield
            return
        self._marks, self._open, self._since = [], ["other"], self._now()
        try:
            with self._waits_timed():
                yield
        finally:
            self._close_mark()
            self._open = []

    def seconds(self) -> dict[str, float]:
        """Seconds of each part in the step last measured: data_seconds, forward_seconds, ... in the order of PARTS."""
        spent: defaultdict[str, float] = defaultdict(float)
        if self._on_gpu:
            torch.cuda.synchronize()
        for name, start, end in self._marks:
            spent[name] += start.elapsed_time(end) / 1000 if self._on_gpu else end - start
        return {f"{name}_seconds": spent[name] for name in PARTS}

    def split(self, step_seconds: float, data_seconds: float) -> dict[str, float]:
        """A mean step without its wait for data, shared out as in the step last measured: they add up to the step."""
        seconds = self.seconds()
        del seconds["data_seconds"]
        scale = (step_seconds - data_seconds) / sum(seconds.values())
        return {name: scale * value for name, value in seconds.items()}

    @contextlib.contextmanager
    def _waits_timed(self) -> Iterator[None]:
        """Every synchronous collective of the step, whoever calls it, ends in `Work.wait`."""
        wait, timeline, own = Work.wait, self, threading.get_ident()

        def timed(work: Work, *args: Any, **kwargs: Any) -> Any:
            # On GPUs the backward runs in a thread of its own, which this one waits for. Other threads, such as that
            # which writes a checkpoint, are not part of the step.
            in_backward = torch._C._current_graph_task_id() != -1
            if threading.get_ident() != own and not in_backward:
                return wait(work, *args, **kwargs)
            with timeline.part("communication"):
                return wait(work, *args, **kwargs)

        Work.wait = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Work.wait = wait  # type: ignore[method-assign]

    def _turn_to(self, name: str) -> None:
        self._close_mark()
        self._open.append(name)

    def _turn_back(self) -> None:
        self._close_mark()
        self._open.pop()

    def _close_mark(self) -> None:
        now = self._now()
        self._marks.append((self._open[-1], self._since, now))
        self._since = now

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
