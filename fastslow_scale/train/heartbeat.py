"""Tells which rank is stuck: every rank leaves a sign of life in the job's store, and looks there when others fail."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
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

    Under NCCL a collective that waits too long ends the process without an exception that anyone could catch. So rank 0
    tells on stderr, while there is time, of a rank that was silent for half of `timeout_seconds`; rank 1 tells of
    rank 0.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float):
        self.step = 0
        self._rank, self._world_size = rank, world_size
        self.interval = min(MOST_SECONDS, timeout_seconds / 10)
        self._patience = timeout_seconds / 2
        self._seen: dict[int, tuple[Beat, float]] = {}
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
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heartbeat/{self._rank}", "")  # silent from now on, and rightly

    def silent_ranks(self) -> list[Beat]:
        """The ranks that have left no sign while this one waits for `MISSED` intervals."""
        everyone = range(self._world_size)
        before = self._read(everyone)
        self._ended.wait(MISSED * self.interval)
        after = self._read(everyone)
        return [beat for rank, beat in after.items() if rank in before and beat.time == before[rank].time]

    def _beat(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._write()
                for beat in self.newly_silent(time.monotonic()):
                    print(f"warning: {describe([beat])}", file=sys.stderr, flush=True)
            except RuntimeError:
                return  # the job's store is gone: the job is ending

    def newly_silent(self, now: float) -> list[Beat]:
        """Ranks that this one watches and whose sign has been the same for too long; each is named once.

        now: seconds on any clock.
        """
        watched = range(1, self._world_size) if self._rank == 0 else range(1) if self._rank == 1 else range(0)
        silent = []
        for rank, beat in self._read(watched).items():
            last, since = self._seen.get(rank, (None, now))
            if last != beat:
                self._seen[rank] = beat, now
            elif now - since > self._patience:
                self._seen[rank] = beat, math.inf
                silent.append(beat)
        return silent

    def _write(self) -> None:
        beat = {"host": socket.gethostname(), "step": self.step, "time": time.time()}
        self._store.set(f"heartbeat/{self._rank}", json.dumps(beat))

    def _read(self, ranks: Iterable[int]) -> dict[int, Beat]:
        beats = {}
        for rank in ranks:
            key = f"heartbeat/{rank}"
            if self._store.check([key]) and (beat := self._store.get(key)):
                beats[rank] = Beat(rank, **json.loads(beat))
        return beats


def describe(silent: list[Beat]) -> str:
    """One line for a person: which ranks, where, and how far they had come."""
    now = time.time()
    return "; ".join(
        f"rank {beat.rank} on {beat.host} does not answer: "
        f"last seen {now - beat.time:.0f} s ago, after step {beat.step}"
        for beat in silent
    )
