"""Progress in bytes: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Called with numbers of bytes as they are done."""

    def __init__(self, advance: Callable[[int], None], shorten: Callable[[int], None]) -> None:
        self._advance = advance
        self.shorten = shorten
        """Takes off the total what need not be done: the rate and the time left are those of the rest."""

    def __call__(self, num_bytes: int) -> None:
        self._advance(num_bytes)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[ByteProgress]:
    """Show progress on stderr while the block runs."""
    console = Console(stderr=True)
    if console.is_terminal:
        numbers = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(TextColumn("{task.description}"), BarColumn(), *numbers, console=console) as bar:
            task = bar.add_task(label, total=total)

            def shorten(num_bytes: int) -> None:
                bar.update(task, total=total - num_bytes)

            yield ByteProgress(lambda num_bytes: bar.advance(task, num_bytes), shorten)
        return
    lines = _Lines(label, total)
    yield ByteProgress(lines.advance, lines.shorten)


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._done = 0
        self._start = self._last = time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def shorten(self, num_bytes: int) -> None:
        self._total -= num_bytes

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not self._done:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = max(0, self._total - self._done) / rate
        of_total = f"{self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB"
        self._console.print(f"{self._label}: {of_total}, {rate / 1e6:.2f} MB/s, {left:.0f} s left", markup=False)
