"""Reads a data folder: random access to rows, and the batches of each optimizer step.

The state of the reading is one integer, the number of samples consumed so far, beside the seed and the fingerprint.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.errors import UserError
from data_pipeline.index import (
    INDEX_DTYPE,
    INDEX_NAME,
    Manifest,
    load_table,
    member_name,
)
from data_pipeline.order import WINDOW_MEMBERS, SampleOrder
from data_pipeline.tokenizer import MODEL_NAME
from data_pipeline.workers import end_with_parent

_MEMBERS_KEPT = 2 * WINDOW_MEMBERS
_FILES_KEPT = 64
_PREFETCH_BATCHES = 4
_SIGNALS_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class TokenDataset:
    """The rows of one split. Cheap to open, safe to pickle and to fork (files are opened where they are read)."""

    def __init__(self, path: Path, split: str, manifest: Manifest, index: npt.NDArray[Any]) -> None:
        """Use `open`."""
        info = manifest.split(split, path)
        self.path = path
        self.split = split
        self.manifest = manifest
        self.tokenizer_path = path / MODEL_NAME
        self.seq_length = manifest.seq_length
        self.vocab_size = manifest.vocab_size
        self.eos_id = manifest.eos_id
        self.pad_id = manifest.pad_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self.fingerprint = manifest.fingerprint
        self.num_samples = info.rows
        self._shards = [shard.name for shard in info.shards]
        self._index = index
        self._members: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()
        self._files: OrderedDict[int, int] = OrderedDict()

    @classmethod
    def open(cls, path: Path | str, split: str = "train", *, tokenizer_sha256: str | None = None) -> TokenDataset:
        """Check the manifest, the index and every shard's existence and size; contents are checked as they are read.

        Args:
            tokenizer_sha256: refuse data that was encoded by another tokenizer.

        Raises:
            UserError: naming the file.
        """
        path = Path(path)
        manifest = Manifest.load(path)
        info = manifest.split(split, path)
        if tokenizer_sha256 not in (None, manifest.tokenizer_sha256):
            raise UserError(
                f"{path} was encoded by another tokenizer: sha256 {manifest.tokenizer_sha256[:12]}..., "
                f"expected {str(tokenizer_sha256)[:12]}..."
            )
        for shard in info.shards:
            check_size(path / split / shard.name, shard.bytes)
        index = load_table(path / split / INDEX_NAME, info.index_sha256, INDEX_DTYPE)
        return cls(path, split, manifest, index)

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """Rows by sample id -> int64 [n, seq_length + 1].

        Raises:
            UserError: a damaged or unreadable member, naming shard and member.
            IndexError: an id outside 0 .. num_samples - 1.
        """
        ids = np.fromiter(indices, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_samples:
            raise IndexError(f"sample ids must lie in 0 .. {self.num_samples - 1}")
        members, within = np.divmod(ids, self.manifest.rows_per_member)
        out = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        for number, (member, row) in enumerate(zip(members.tolist(), within.tolist(), strict=True)):
            out[number] = self._member(member)[row]
        return torch.from_numpy(out)

    def _member(self, member: int) -> npt.NDArray[Any]:
        """[rows, seq_length + 1] of one member, from the few that are kept."""
        rows = self._members.get(member)
        if rows is None:
            rows = self._members[member] = self._read_member(member)
            if len(self._members) > _MEMBERS_KEPT:
                self._members.popitem(last=False)
        else:
            self._members.move_to_end(member)
        return rows

    def _read_member(self, member: int) -> npt.NDArray[Any]:
        entry = self._index[member]
        size = int(entry["size"])
        place = f"{self.path / self.split / self._shards[int(entry['shard'])]} member {member_name(member)}"
        try:
            # pread, not mmap: a file cut short while it is read gives a short answer here and a SIGBUS there
            payload = os.pread(self._file(int(entry["shard"])), size, int(entry["offset"]))
        except OSError as error:
            raise UserError(f"{place}: {error.strerror}") from None
        if len(payload) != size or zlib.crc32(payload) != int(entry["crc32"]):
            raise UserError(f"{place} is damaged (its payload's crc32 differs)")
        return np.frombuffer(payload, dtype=self.manifest.dtype).reshape(int(entry["rows"]), self.seq_length + 1)

    def _file(self, shard: int) -> int:
        descriptor = self._files.get(shard)
        if descriptor is None:
            descriptor = os.open(self.path / self.split / self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
            self._files[shard] = descriptor
            if len(self._files) > _FILES_KEPT:
                os.close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(shard)
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": OrderedDict(), "_files": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)


def check_size(path: Path, num_bytes: int) -> None:
    """Raises `UserError` where a file is missing or has another size."""
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if actual != num_bytes:
        raise UserError(f"{path} has {actual} bytes, the manifest says {num_bytes}")


def step_batches(
    dataset: TokenDataset,
    *,
    seed: int,
    start_sample: int,
    global_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 1,
) -> Iterator[torch.Tensor]:
    """Endless batches of one data-parallel rank: int64 [global_batch_size // dp_size, seq_length + 1] per step.

    Step k of rank r holds positions start_sample + k * G + r * G/n ... of the global order; the ranks' batches put one
    after another are the same for every dp_size and num_workers. A batch may reach into the next epoch, which has an
    order of its own. Tensor-parallel peers pass the same dp_rank and read the same.

    Raises:
        UserError: sizes that do not fit, at once; a damaged member, by the step that holds it.
    """
    if global_batch_size % dp_size:
        raise UserError(f"global batch size {global_batch_size} must be a multiple of data-parallel size {dp_size}")
    if not 0 <= dp_rank < dp_size or start_sample < 0:
        raise ValueError(f"dp_rank {dp_rank} of {dp_size}, start_sample {start_sample}")
    size = global_batch_size // dp_size
    starts = _StepStarts(start_sample + dp_rank * size, global_batch_size, size)
    samples = _Samples(dataset, seed)
    if num_workers == 0:
        return _good_batches(map(samples.__getitems__, starts))
    return _from_workers(samples, starts, num_workers)


class _StepStarts:
    """Batch sampler: the positions of each step's batch, as a range, without end."""

    def __init__(self, first: int, stride: int, size: int) -> None:
        self._first, self._stride, self._size = first, stride, size

    def __iter__(self) -> Iterator[Sequence[int]]:
        first = self._first
        while True:
            yield range(first, first + self._size)
            first += self._stride


class _Samples(Dataset[torch.Tensor]):
    """Map-style view of the global order: position -> row."""

    def __init__(self, dataset: TokenDataset, seed: int) -> None:
        self._dataset = dataset
        self._order = SampleOrder(dataset.num_samples, dataset.manifest.rows_per_member, seed)

    def __getitems__(self, positions: Sequence[int]) -> torch.Tensor | UserError:
        """A batch at once. An error travels as a value: torch would bury its one line in a worker's traceback."""
        try:
            return self._dataset.rows(self._order(positions[0], len(positions)))
        except UserError as error:
            return error


def _good_batches(batches: Iterator[torch.Tensor | UserError]) -> Iterator[torch.Tensor]:
    while True:
        batch = next(batches)
        if isinstance(batch, UserError):
            del batches  # ends the workers now; a traceback would keep them, and garbage collection ends them slowly
            raise batch
        yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _from_workers(samples: _Samples, starts: _StepStarts, num_workers: int) -> Iterator[torch.Tensor]:
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
    return _good_batches(_with_signals_blocked(loader.__iter__))


def _start_worker(worker_id: int) -> None:
    end_with_parent()  # torch looks for this itself, but not for a parent that was killed while the worker started


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
