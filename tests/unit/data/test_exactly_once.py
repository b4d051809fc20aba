"""Every sample exactly once an epoch, however often the readers are killed and their number changes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from data_pipeline.batches import step_batches
from data_pipeline.stream import TokenDataset
from tests.unit.data.test_order import naive_epoch

pytestmark = pytest.mark.unit

BATCH, SEED = 24, 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path], texts: list[str]) -> Path:
    """Three uneven shards: two full ones and a rest."""
    path = write(tmp_path_factory.mktemp("uneven") / "data", texts, shard_bytes=10_000)
    members = [shard.members for shard in TokenDataset.open(path).manifest.splits["train"].shards]
    assert len(members) == 3
    assert members[0] == members[1] > members[2]
    return path


@pytest.fixture(scope="module")
def ids(folder: Path) -> dict[bytes, int]:
    """Row -> sample id."""
    dataset = TokenDataset.open(folder)
    rows = dataset.rows(range(dataset.num_samples)).numpy()
    known = {row.tobytes(): sample for sample, row in enumerate(rows)}
    assert len(known) == dataset.num_samples, "no two rows alike"
    return known


@pytest.fixture(scope="module")
def uninterrupted(ids: dict[bytes, int]) -> list[int]:
    """Three epochs and a bit, from the definition of the order alone."""
    return [sample for epoch in range(4) for sample in naive_epoch(len(ids), 64, SEED, epoch, 32)]


def readers(folder: Path, step: int, ranks: int, workers: int = 0) -> list[Iterator[torch.Tensor]]:
    """Of every rank, from a step on."""
    return [
        step_batches(
            TokenDataset.open(folder),
            seed=SEED,
            start_sample=step * BATCH,
            global_batch_size=BATCH,
            dp_rank=rank,
            dp_size=ranks,
            num_workers=workers,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_killed_readers_go_on_where_the_last_checkpoint_was(
    folder: Path, ids: dict[bytes, int], uninterrupted: list[int], seed: int
) -> None:
    """A kill loses the steps since the checkpoint, ledger and all; they are read again, by other ranks."""
    rng = random.Random(seed)
    total = -(-3 * len(ids) // BATCH)
    ledger: list[int] = []
    kills = 0
    for ranks in itertools.cycle((4, 2, 8, 1)):
        step = len(ledger) // BATCH
        running = readers(folder, step, ranks)
        until = min(total, step + rng.randint(1, total // 6))
        for _ in range(step, until):
            ledger += [ids[row.numpy().tobytes()] for reader in running for row in next(reader)]
        if until == total:
            break
        kills += 1
        checkpoint = rng.randint(step, until)
        del ledger[checkpoint * BATCH :]
    n = len(ids)
    assert kills >= 4, "every number of ranks had its turn"
    assert ledger == uninterrupted[: total * BATCH]
    for epoch in range(3):
        assert sorted(ledger[epoch * n : (epoch + 1) * n]) == list(range(n))


READER = """
import sys
from data_pipeline.batches import step_batches
from data_pipeline.stream import TokenDataset
from tests.unit.data.test_exactly_once import readers

if __name__ == "__main__":
    folder, step, ranks, workers = sys.argv[1], *map(int, sys.argv[2:])
    running = readers(folder, step, ranks, workers)
    while True:
        rows = [row for reader in running for row in next(reader)]
        print(*[row.numpy().tobytes().hex() for row in rows], flush=True)
"""


@pytest.mark.slow
def test_processes_killed_with_their_workers(
    folder: Path, ids: dict[bytes, int], uninterrupted: list[int], tmp_path: Path
) -> None:
    """SIGKILL in the middle of reading, then other ranks with another number of worker processes each."""
    script = tmp_path / "reader.py"
    script.write_text(READER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    rng = random.Random(1)
    total = -(-3 * len(ids) // BATCH)
    ledger: list[int] = []
    for ranks, workers, share in ((4, 0, 5), (2, 1, 3), (8, 0, 3), (1, 3, 2), (1, 2, 1)):
        step = len(ledger) // BATCH
        until = total if share == 1 else step + (total - step) // share - rng.randint(0, 3)
        command = [sys.executable, str(script), str(folder), str(step), str(ranks), str(workers)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            for _ in range(step, until):
                ledger += [ids[bytes.fromhex(row)] for row in reader.stdout.readline().split()]
            reader.kill()
    assert ledger == uninterrupted[: total * BATCH]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_uneven_shards_keep_no_rank_waiting(
    folder: Path, ids: dict[bytes, int], uninterrupted: list[int], workers: int
) -> None:
    """Four ranks, over the end of an epoch: as many batches of the same size on each."""
    steps = len(ids) // BATCH + 3
    parts = [
        torch.stack(list(itertools.islice(reader, steps))) for reader in readers(folder, 0, ranks=4, workers=workers)
    ]
    assert [part.shape for part in parts] == [(steps, BATCH // 4, 17)] * 4
    rows = torch.cat(parts, dim=1).reshape(-1, 17)
    assert [ids[row.numpy().tobytes()] for row in rows] == uninterrupted[: steps * BATCH]
