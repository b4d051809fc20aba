"""Where the time of a training step goes; validation and checkpoints are not counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Averages over the steps since the last reading."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._steps = 0
        self._data = 0.0
        self._spent = 0.0
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._data += time.perf_counter() - before

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what happens inside."""
        self._spent += time.perf_counter() - self._started
        try:
            yield
        finally:
            self._started = time.perf_counter()

    def count_step(self) -> None:
        self._steps += 1

    def read(self) -> dict[str, float]:
        """tokens_per_second, step_seconds and data_seconds of the mean step since the last reading."""
        now = time.perf_counter()
        seconds = (self._spent + now - self._started) / max(1, self._steps)
        data = self._data / max(1, self._steps)
        self._steps, self._data, self._spent, self._started = 0, 0.0, 0.0, now
        return {
            "tokens_per_second": self._tokens_per_step / seconds,
            "step_seconds": seconds,
            "data_seconds": data,
        }
