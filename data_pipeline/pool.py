"""Encodes the units of a corpus with several processes, and leaves out those that an earlier run has finished."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from data_pipeline.encode import Reading, encode_unit
from data_pipeline.errors import UserError
from data_pipeline.index import token_dtype
from data_pipeline.inputs import InputFiles
from data_pipeline.readers import OnRead
from data_pipeline.spool import UnitSummary, load_summary, remove_others
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.units import Unit, plan_units
from data_pipeline.workers import end_with_parent

_SECONDS_BETWEEN_LOOKS = 0.1
_READ_BYTES_TOLD = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The files that `data shard` was given, and how they are read."""

    files: InputFiles
    reading: Reading


@dataclass(frozen=True)
class EncodedCorpus:
    """Keys of the units in the order of the input, and what came out of each."""

    keys: list[str]
    summaries: list[UnitSummary]


def encode_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    workers: int = 1,
    on_bytes: OnRead = lambda num_bytes: None,
    on_kept: OnRead = lambda num_bytes: None,
    say: Callable[[str], None] = lambda line: None,
) -> EncodedCorpus:
    """Fill `folder` with the spool of a corpus. What is written does not depend on `workers`.

    Units that the folder holds already are kept: their names tell inputs, options and tokenizer. `on_bytes` is told of
    bytes of the input as they are read, `on_kept` of those that need not be.

    Raises:
        UserError: a bad document (unless faults are skipped), or a worker that died. Finished units stay.
        KeyboardInterrupt: passed on when the workers have ended.
    """
    units = plan_units(corpus.files)
    recipe = corpus.reading.recipe(tokenizer)
    keys = [unit.key(recipe) for unit in units]
    dtype = token_dtype(tokenizer.vocab_size)
    strangers = remove_others(folder, set(keys))
    found = [load_summary(folder, key, dtype) for key in keys]
    summaries = {number: summary for number, summary in enumerate(found) if summary is not None}
    if strangers:
        say(f"not used: {strangers} parts of an interrupted run, whose command or input files were not the same")
    if summaries:
        say(f"continuing an interrupted run: {len(summaries)} of {len(units)} parts are encoded already")
    on_kept(sum(units[number].num_bytes for number in summaries))
    missing = [number for number in range(len(units)) if number not in summaries]
    tasks = [(number, units[number], keys[number]) for number in missing]
    if workers == 1 or len(tasks) < 2:
        for number, unit, key in tasks:
            summaries[number] = encode_unit(unit, key, corpus.reading, tokenizer, folder, on_bytes)
    else:
        with _Workers(min(workers, len(tasks)), corpus.reading, tokenizer, folder) as pool:
            summaries |= pool.run(tasks, on_bytes)
    return EncodedCorpus(keys, [summaries[number] for number in range(len(units))])


class _Workers:
    """Processes that encode units. Leaving the block ends them within a second or so, whatever they are doing."""

    def __init__(self, count: int, reading: Reading, tokenizer: Tokenizer, folder: Path) -> None:
        # spawn: the parent may hold threads (torch, progress) that a forked child would inherit half alive
        context: SpawnContext = multiprocessing.get_context("spawn")
        self._count = count
        self._bytes_read = context.Value("q", 0)
        self._stop = context.Value("b", 0, lock=False)
        shared = (tokenizer.model, reading, folder, self._bytes_read, self._stop)
        self._pool = ProcessPoolExecutor(count, context, _start_worker, shared)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.value = 1
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: list[tuple[int, Unit, str]], on_bytes: OnRead) -> dict[int, UnitSummary]:
        waiting = iter(tasks)
        running: dict[Future[UnitSummary], int] = {}
        done: dict[int, UnitSummary] = {}
        told = 0
        try:
            while True:
                while len(running) < 2 * self._count and (task := next(waiting, None)) is not None:
                    number, unit, key = task
                    running[self._pool.submit(_encode_in_worker, unit, key)] = number
                if not running:
                    return done
                ended, _ = wait(running, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                for future in sorted(ended, key=running.__getitem__):
                    done[running.pop(future)] = future.result()
                total = self._bytes_read.value
                on_bytes(total - told)
                told = total
        except BrokenProcessPool:
            raise UserError("a worker process was killed, perhaps for want of memory; try fewer --workers") from None


class _Stopped(Exception):
    """The parent wants no more."""


_worker: dict[str, Any] = {}


def _start_worker(model: bytes, reading: Reading, folder: Path, bytes_read: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    _worker.update(tokenizer=Tokenizer(model), reading=reading, folder=folder, bytes_read=bytes_read, stop=stop)


def _encode_in_worker(unit: Unit, key: str) -> UnitSummary:
    untold = 0

    def on_read(num_bytes: int) -> None:
        nonlocal untold
        if _worker["stop"].value:
            raise _Stopped
        untold += num_bytes
        if untold >= _READ_BYTES_TOLD:
            tell()

    def tell() -> None:
        nonlocal untold
        with _worker["bytes_read"].get_lock():
            _worker["bytes_read"].value += untold
        untold = 0

    summary = encode_unit(unit, key, _worker["reading"], _worker["tokenizer"], _worker["folder"], on_read)
    tell()
    return summary
