"""Checkpoints of a running training: what must stand still is the copy to host memory; the rest is in the background.

The background of every rank is one thread with a process group of its own, so that its messages never mix with the
training's. What went wrong there stops all ranks at one and the same step: in gloo or NCCL a rank that went one step
further would wait for the others for ever.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastslow_scale.config import CheckpointConfig
from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.train.agreement import Ranks
from fastslow_scale.train.checkpoint import Snapshot, reserve_buffers, store, take_snapshot
from fastslow_scale.train.host_buffers import HostBuffers


class Saver:
    """Saves one engine's checkpoints in `folder`. All ranks make it, and call its methods, in the same order.

    With `checkpoint.asynchronous: false`, `save` returns when the checkpoint is durable, and no buffer is held.
    """

    def __init__(self, engine: Any, mesh: Mesh, folder: Path, config: CheckpointConfig, timeout_seconds: float) -> None:
        self._engine, self._mesh, self._folder, self._config = engine, mesh, folder, config
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        self._ranks = Ranks(self._group)
        self._buffers = HostBuffers(mesh.device)
        if config.asynchronous:
            reserve_buffers(engine, mesh, self._buffers)
        self._thread: threading.Thread | None = None
        self._durable: list[Path] = []
        self._failure: Exception | None = None
        # Who has passed how many checks, for the ranks to agree on the one that raises.
        self._changed = threading.Condition()
        self._agreeing = False
        self._checks = 0
        self._raise_at = 0

    def save(self, step: int, state: Mapping[str, Any], rank_state: Mapping[str, torch.Tensor]) -> None:
        """Save the engine as it is now. A save that is still being written is waited for.

        Args:
            state: JSON-able; rank 0's is saved.
            rank_state: this rank's own tensors, such as the state of its random number generators.

        Raises:
            UserError, RuntimeError: the save before this one has failed; or, not asynchronous, this one.
        """
        self._join()
        if not self._config.asynchronous:
            self._store(step, lambda: take_snapshot(self._engine, self._mesh, step, state, rank_state))
            return
        try:
            snapshot = take_snapshot(self._engine, self._mesh, step, state, rank_state, self._buffers)
        except Exception as error:
            # Other ranks do not know yet: they learn it where they learn of a failed write.
            self._start(step, functools.partial(_raise, error))
        else:
            self._start(step, lambda: snapshot)

    def check(self) -> list[Path]:
        """Call once a step: the checkpoints that have become durable since the last call.

        Raises:
            UserError, RuntimeError: a save in the background has failed; on all ranks in the same call.
        """
        with self._changed:
            self._checks += 1
            self._changed.wait_for(lambda: not self._agreeing)
            if self._failure is not None and self._checks >= self._raise_at:
                raise self._failure
            return self._take_durable()

    def wait(self) -> list[Path]:
        """As `check`, once nothing is being written any more: all that was saved is durable."""
        self._join()
        return self._take_durable()

    def settle(self) -> None:
        """Let the background end, whatever comes of it: for a run that ends for another reason."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Settle, and give up the background's group; what went wrong there is `check`'s and `wait`'s business."""
        self.settle()
        dist.destroy_process_group(self._group)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _take_durable(self) -> list[Path]:
        durable, self._durable = self._durable, []
        return durable

    def _start(self, step: int, snapshot_of: Callable[[], Snapshot]) -> None:
        # A daemon: a process that ends for another reason does not wait for it, and a save cut short harms nothing.
        self._thread = threading.Thread(
            target=self._store_in_background, args=(step, snapshot_of), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _store_in_background(self, step: int, snapshot_of: Callable[[], Snapshot]) -> None:
        try:
            self._store(step, snapshot_of)
        except Exception as error:
            self._stop_all_ranks(error)

    def _store(self, step: int, snapshot_of: Callable[[], Snapshot]) -> None:
        keep, keep_every = self._config.keep, self._config.keep_every
        path = store(snapshot_of, self._mesh, self._ranks, self._folder, step, keep, keep_every)
        with self._changed:
            self._durable.append(path)

    def _stop_all_ranks(self, failure: Exception) -> None:
        """Agree on the check that raises: the first that no rank has passed. Checks wait for the agreement."""
        with self._changed:
            self._agreeing = True
            passed = self._checks
        try:
            raise_at = 1 + max(self._ranks.gather(passed))
        except Exception:  # the other ranks are gone: nothing to agree on
            raise_at = 0
        with self._changed:
            self._failure, self._raise_at, self._agreeing = failure, raise_at, False
            self._changed.notify_all()


def _raise(error: Exception) -> Snapshot:
    raise error
