"""Tells which rank is stuck: every rank leaves a sign of life in the job's store, and looks there when others fail."""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

MOST_SECONDS = 5.0
MISSED = 3


@dataclass(frozen=True)
class Beat:
    """A rank's latest sign of life. `time`: its own clock, seconds since 1970."""

    rank: int
    host: str
    step: int
    time: float


class Heartbeat:
    """A thread that writes (host, step, time) into the store every few seconds.

    It has a connection of its own, so that it never waits behind the training's use of the store. A rank whose process
    is stopped, killed or swapped out leaves no sign; one that waits for another rank does.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float):
        self.step = 0
        self._rank, self._world_size = rank, world_size
        self.interval = min(MOST_SECONDS, timeout_seconds / 10)
        self._ended = threading.Event()
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        self._write()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def silent_ranks(self) -> list[Beat]:
        """The ranks that have left no sign while this one waits for `MISSED` intervals."""
        before = self._read()
        self._ended.wait(MISSED * self.interval)
        after = self._read()
        return [beat for rank, beat in after.items() if rank in before and beat.time == before[rank].time]

    def _beat(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._write()
            except RuntimeError:
                return  # the job's store is gone: the job is ending

    def _write(self) -> None:
        beat = {"host": socket.gethostname(), "step": self.step, "time": time.time()}
        self._store.set(f"heartbeat/{self._rank}", json.dumps(beat))

    def _read(self) -> dict[int, Beat]:
        beats = {}
        for rank in range(self._world_size):
            key = f"heartbeat/{rank}"
            if self._store.check([key]):
                beats[rank] = Beat(rank, **json.loads(self._store.get(key)))
        return beats


def describe(silent: list[Beat]) -> str:
    """One line for a person: which ranks, where, and how far they had come."""
    now = time.time()
    return "; ".join(
        f"rank {beat.rank} on {beat.host} does not answer: "
        f"last seen {now - beat.time:.0f} s ago, after step {beat.step}"
        for beat in silent
    )
