"""The batches of each optimizer step, on any number of ranks and reader processes.

The state of the reading is one integer, the number of samples consumed so far, beside the seed and the fingerprint.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.errors import UserError
from data_pipeline.mixture import Data, Reader
from data_pipeline.workers import end_with_parent, end_without_finalising

_PREFETCH_BATCHES = 4
_SIGNALS_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def step_batches(
    data: Data,
    *,
    seed: int,
    start_sample: int,
    global_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 1,
    on_skip: Callable[[str], None] = lambda line: None,
) -> Iterator[torch.Tensor]:
    """Endless batches of one data-parallel rank: int64 [global_batch_size // dp_size, seq_length + 1] per step.

    Step k of rank r holds positions start_sample + k * G + r * G/n ... of the global order; the ranks' batches put one
    after another are the same for every dp_size and num_workers. A batch may reach into the next epoch, which has an
    order of its own. Tensor-parallel peers pass the same dp_rank and read the same.

    Args:
        on_skip: told of each damaged member, as often as there are workers that met it, before its batch is given out.

    Raises:
        UserError: sizes that do not fit, at once; a damaged member, by the step that holds it.
    """
    if global_batch_size % dp_size:
        raise UserError(f"global batch size {global_batch_size} must be a multiple of data-parallel size {dp_size}")
    if not 0 <= dp_rank < dp_size or start_sample < 0:
        raise ValueError(f"dp_rank {dp_rank} of {dp_size}, start_sample {start_sample}")
    size = global_batch_size // dp_size
    starts = _StepStarts(start_sample + dp_rank * size, global_batch_size, size)
    samples = _Samples(data, seed)
    if num_workers == 0:
        return _good_batches(map(samples.__getitems__, starts), on_skip)
    return _good_batches(_from_workers(samples, starts, num_workers), on_skip)


class _StepStarts:
    """Batch sampler: the positions of each step's batch, as a range, without end."""

    def __init__(self, first: int, stride: int, size: int) -> None:
        self._first, self._stride, self._size = first, stride, size

    def __iter__(self) -> Iterator[Sequence[int]]:
        first = self._first
        while True:
            yield range(first, first + self._size)
            first += self._stride


class _Batch(NamedTuple):
    rows: torch.Tensor
    """In the type in which they are stored: what passes between processes is then a quarter or half as large."""
    skipped: list[str]


class _Samples(Dataset[torch.Tensor]):
    """Map-style view of the global order: position -> row."""

    def __init__(self, data: Data, seed: int) -> None:
        self._data = data
        self._reader = Reader(data, seed)

    def __getitems__(self, positions: Sequence[int]) -> _Batch | UserError:
        """A batch at once. An error travels as a value: torch would bury its one line in a worker's traceback."""
        try:
            rows = torch.from_numpy(self._reader.stored_rows(positions[0], len(positions)))
        except UserError as error:
            return error
        return _Batch(rows, self._data.take_skipped())


def _good_batches(batches: Iterator[_Batch | UserError], on_skip: Callable[[str], None]) -> Iterator[torch.Tensor]:
    while True:
        batch = next(batches)
        if isinstance(batch, UserError):
            del batches  # ends the workers now; a traceback would keep them, and garbage collection ends them slowly
            raise batch
        for line in batch.skipped:
            on_skip(line)
        yield torch.from_numpy(batch.rows.numpy().astype(np.int64))  # torch's own cast of these types is slow


def _as_it_is(batch: Any) -> Any:
    return batch


def _from_workers(samples: _Samples, starts: _StepStarts, num_workers: int) -> Iterator[_Batch | UserError]:
    """Batches in order from worker processes.

    The workers are spawned, not forked: a fork would inherit the trainer's threads half alive, its sockets (a peer of a
    killed rank would not see the connection close) and its signal handlers.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=starts,  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=_as_it_is,
        prefetch_factor=_PREFETCH_BATCHES,
        worker_init_fn=_start_worker,
        multiprocessing_context="spawn",
    )
    return _with_signals_blocked(loader.__iter__)


def _start_worker(worker_id: int) -> None:
    end_with_parent()  # torch looks for this itself, but not for a parent that was killed while the worker started
    end_without_finalising()


def _with_signals_blocked(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start processes that inherit a mask without the signals meant for the trainer.

    A cluster sends its warning to every process of a job: it must not kill a worker while the trainer saves. Signals
    that arrive meanwhile reach the parent afterwards.
    """
    resource_tracker.ensure_running()  # starting this helper later would unblock two of the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_PARENT)
    try:
        return start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
