"""Batches: the same global order whatever the ranks, the workers and the place where reading begins."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.batches import step_batches
from data_pipeline.errors import UserError
from data_pipeline.order import SampleOrder
from data_pipeline.stream import TokenDataset

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def dataset(shared_folder: Path) -> TokenDataset:
    return TokenDataset.open(shared_folder)


def raw_rows(folder: Path) -> np.ndarray:
    """All training rows, cut out of the archives by the index with plain slices."""
    index = np.load(folder / "train" / "index.npy")
    shards = [path.read_bytes() for path in sorted((folder / "train").glob("*.tar"))]
    payload = b"".join(shards[entry["shard"]][entry["offset"] :][: entry["size"]] for entry in index)
    return np.frombuffer(payload, dtype="<u2").reshape(-1, 17)


def batches(dataset: TokenDataset, steps: int, **options: Any) -> torch.Tensor:
    """[steps, batch, seq_length + 1]"""
    defaults: dict[str, Any] = {
        "seed": 5,
        "start_sample": 0,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "num_workers": 0,
    }
    return torch.stack(list(itertools.islice(step_batches(dataset, **{**defaults, **options}), steps)))


def test_rows_are_the_stored_tokens(dataset: TokenDataset, shared_folder: Path) -> None:
    expected = raw_rows(shared_folder).astype(np.int64)
    n = dataset.num_samples
    assert n == len(expected)
    everything = dataset.rows(range(n))
    assert everything.dtype == torch.int64
    assert everything.numpy().tolist() == expected.tolist()
    picked = [n - 1, 0, 64, 63, 0, n // 2]
    assert dataset.rows(picked).tolist() == expected[picked].tolist()
    assert dataset.rows(torch.tensor(picked)).tolist() == expected[picked].tolist()
    assert dataset.rows([]).shape == (0, 17)


@pytest.mark.parametrize("sample", [-1, 10**9])
def test_rows_outside_are_refused(dataset: TokenDataset, sample: int) -> None:
    with pytest.raises(IndexError):
        dataset.rows([0, sample])


def test_attributes_say_what_the_trainer_needs(dataset: TokenDataset, shared_folder: Path) -> None:
    assert (dataset.seq_length, dataset.vocab_size, dataset.eos_id, dataset.pad_id) == (16, 400, 2, 3)
    assert dataset.path == shared_folder
    assert dataset.tokenizer_path == shared_folder / "tokenizer.model"
    assert len(dataset.fingerprint) == 64
    assert TokenDataset.open(str(shared_folder), "validation").fingerprint == dataset.fingerprint


def test_fingerprint_follows_the_content(
    tmp_path: Path, write: Callable[..., Path], texts: list[str], dataset: TokenDataset
) -> None:
    same = write(tmp_path / "same", texts, shard_bytes=5_000)
    other = write(tmp_path / "other", [*texts[:-1], texts[-1] + "!"], shard_bytes=5_000)
    assert TokenDataset.open(same).fingerprint == dataset.fingerprint
    assert TokenDataset.open(other).fingerprint != dataset.fingerprint


def test_steps_walk_through_the_global_order(dataset: TokenDataset, shared_folder: Path) -> None:
    rows = raw_rows(shared_folder)
    n = dataset.num_samples
    steps = 2 * n // 8 + 2
    order = SampleOrder(n, 64, seed=5)
    read = batches(dataset, steps).reshape(steps * 8, 17)
    assert n % 8, "an epoch must end within a batch for this test"
    assert read.tolist() == rows[order(0, steps * 8)].tolist()
    assert sorted(read[:n].tolist()) == sorted(read[n : 2 * n].tolist()) == sorted(rows.tolist())
    assert read[:n].tolist() != read[n : 2 * n].tolist()


def test_any_resume_with_any_ranks_continues_the_uninterrupted_order(dataset: TokenDataset) -> None:
    n = dataset.num_samples
    steps = n // 8 + 3
    whole = batches(dataset, steps)
    for start_step in (0, 1, 7, n // 8 - 1, n // 8):
        for dp_size in (1, 2, 4, 8):
            parts = [
                batches(dataset, 2, start_sample=start_step * 8, dp_rank=rank, dp_size=dp_size)
                for rank in range(dp_size)
            ]
            assert torch.equal(torch.cat(parts, dim=1), whole[start_step : start_step + 2])


def test_a_ledger_over_changing_ranks_covers_each_epoch_once(dataset: TokenDataset) -> None:
    n = dataset.num_samples
    consumed, ledger = 0, []
    for steps, dp_size in ((5, 4), (n // 8, 2), (11, 8), (2 * n // 8, 1)):
        parts = [batches(dataset, steps, start_sample=consumed, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
        ledger += torch.cat(parts, dim=1).reshape(-1, 17).tolist()
        consumed += steps * 8
    assert len(ledger) == consumed > 3 * n
    everything = sorted(dataset.rows(range(n)).tolist())
    for epoch in range(3):
        assert sorted(ledger[epoch * n : (epoch + 1) * n]) == everything
    assert ledger == batches(dataset, consumed // 8).reshape(-1, 17).tolist()


def test_the_batch_size_may_change_on_resume(dataset: TokenDataset) -> None:
    first = batches(dataset, 3, global_batch_size=8).reshape(-1, 17)
    second = batches(dataset, 2, global_batch_size=12, start_sample=24).reshape(-1, 17)
    assert torch.equal(torch.cat((first, second)), batches(dataset, 6).reshape(-1, 17))


def test_seeds_give_different_orders(dataset: TokenDataset) -> None:
    assert not torch.equal(batches(dataset, 4, seed=1), batches(dataset, 4, seed=2))


def test_sizes_that_do_not_fit_are_refused_at_once(dataset: TokenDataset) -> None:
    with pytest.raises(UserError, match="global batch size 8 must be a multiple of data-parallel size 3"):
        step_batches(dataset, seed=0, start_sample=0, global_batch_size=8, dp_rank=0, dp_size=3)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing_and_end_with_their_reader(dataset: TokenDataset, num_workers: int) -> None:
    """Includes the cluster's signals: a worker must not die of what is meant for the trainer."""
    before = set(multiprocessing.active_children())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    reader = step_batches(
        dataset, seed=5, start_sample=24, global_batch_size=8, dp_rank=1, dp_size=2, num_workers=num_workers
    )
    read = [next(reader) for _ in range(3)]
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == num_workers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    for worker in workers:
        assert worker.daemon
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            os.kill(worker.pid or 0, number)
    read += [next(reader) for _ in range(9)]
    expected = batches(dataset, 12, start_sample=24, dp_rank=1, dp_size=2)
    assert torch.equal(torch.stack(read), expected)
    del reader
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0


FRESH_READER = """
import multiprocessing, os, sys, time
from data_pipeline.batches import step_batches
from data_pipeline.stream import TokenDataset

if __name__ == "__main__":
    dataset = TokenDataset.open(sys.argv[1])
    reader = step_batches(
        dataset, seed=0, start_sample=0, global_batch_size=8, dp_rank=0, dp_size=1, num_workers=2
    )
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_of_a_killed_trainer_end(tmp_path: Path, shared_folder: Path) -> None:
    """Even when the workers were just starting. In a process of its own: the first start of a worker is special."""
    script = tmp_path / "reader.py"
    script.write_text(FRESH_READER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script), str(shared_folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        blocked = [_blocked_signals(worker) for worker in workers]
        trainer.kill()
    assert len(workers) == 2
    for signals in blocked:
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= signals
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive their trainer"
        time.sleep(0.1)


def _blocked_signals(pid: int) -> set[int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(status["SigBlk"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_worker_reports_damage_in_one_line(tmp_path: Path, write: Callable[..., Path], texts: list[str]) -> None:
    folder = write(tmp_path / "data", texts[:40])
    shard = folder / "train" / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    for num_workers in (0, 1):
        reader = step_batches(
            TokenDataset.open(folder),
            seed=0,
            start_sample=0,
            global_batch_size=64,
            dp_rank=0,
            dp_size=1,
            num_workers=num_workers,
        )
        with pytest.raises(UserError) as raised:
            list(itertools.islice(reader, 4))
        assert not multiprocessing.active_children(), "ended by the error itself"
        assert str(raised.value) == f"{shard} member 000000000.bin is damaged (its payload's crc32 differs)"


def test_memory_and_open_files_stay_bounded(
    tmp_path: Path, write: Callable[..., Path], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.folder.LocalFolder.files_kept", 3)
    monkeypatch.setattr("data_pipeline.stream._MEMBERS_KEPT", 2)
    dataset = TokenDataset.open(write(tmp_path / "data", texts[:80], seq_length=4, shard_bytes=1))
    assert len(dataset.manifest.splits["train"].shards) > 6
    open_before = len(os.listdir("/proc/self/fd"))
    rows = dataset.rows(range(dataset.num_samples))
    assert len(dataset._members) == 2
    assert len(os.listdir("/proc/self/fd")) == open_before + 3
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy.rows(range(dataset.num_samples)), rows)
    del copy, dataset
    assert len(os.listdir("/proc/self/fd")) == open_before
