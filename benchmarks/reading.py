"""What reading costs: tokens per second and per CPU second beside other readers, resume, memory, time spent waiting.

python benchmarks/reading.py rates               beside np.memmap and plain WebDataset; --mosaic: MosaicML streaming too
python benchmarks/reading.py resume              from the start of a resume to the first batch, at 10^8 samples
python benchmarks/reading.py memory              resident memory of the reader over 10^5 batches
python benchmarks/reading.py waiting RUN         share of the step time that a run spent waiting for data
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
import webdataset
from torch.utils.data import DataLoader, Dataset

from data_pipeline.batches import step_batches
from data_pipeline.index import (
    DOCUMENT_DTYPE,
    INDEX_DTYPE,
    Manifest,
    ShardInfo,
    SplitInfo,
    member_name,
    save_table,
)
from data_pipeline.stream import TokenDataset
from fastslow_scale.monitor import read_metrics

VOCABULARY = 32_000
MEMBER_ROWS = 64
SHARD_MEMBERS = 32
BATCH = 32
MOSAIC = ("mosaicml-streaming==0.13.0", "Brotli", "xxhash", "zstd", "python-snappy", "cramjam", "catalogue")
VISION = {  # what its readers of images, which are not used here, import
    "__init__.py": "",
    "datasets.py": "VisionDataset = CIFAR10 = object\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "to_tensor = None\n",
}


def made_up_rows(count: int, seq_length: int) -> npt.NDArray[np.uint16]:
    rng = np.random.default_rng(0)
    return rng.integers(4, VOCABULARY, (count, seq_length + 1), dtype=np.uint16)


def write_folder(folder: Path, rows: npt.NDArray[np.uint16], repeat: int = 1) -> Path:
    """A data folder of these rows. `repeat`: as many entries of the index for each member, to simulate a large one."""
    train = folder / "train"
    train.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(b"")
    records, shards = [], []
    blocks = [rows[first : first + MEMBER_ROWS] for first in range(0, len(rows), MEMBER_ROWS)]
    for first in range(0, len(blocks), SHARD_MEMBERS):
        path = train / f"shard-{len(shards):06d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for block in blocks[first : first + SHARD_MEMBERS]:
                payload = block.tobytes()
                header = tarfile.TarInfo(member_name(len(records)))
                header.size = len(payload)
                records.append((len(shards), len(block), archive.offset + 512, len(payload), zlib.crc32(payload)))
                archive.addfile(header, io.BytesIO(payload))
        shards.append(ShardInfo(path.name, path.stat().st_size, "", len(blocks[first : first + SHARD_MEMBERS])))
    index = np.tile(np.array(records, dtype=INDEX_DTYPE), repeat)
    count = int(index["rows"].sum())
    split = SplitInfo(
        documents=1,
        tokens=count,
        bytes=count,
        characters=count,
        rows=count,
        index_sha256=save_table(train / "index.npy", index),
        documents_sha256=save_table(train / "documents.npy", np.zeros(1, dtype=DOCUMENT_DTYPE)),
        shards=tuple(shards),
    )
    Manifest(
        seq_length=rows.shape[1] - 1,
        dtype="<u2",
        vocab_size=VOCABULARY,
        eos_id=2,
        pad_id=3,
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        rows_per_member=MEMBER_ROWS,
        build={},
        splits={"train": split},
    ).save(folder)
    return folder


def reader_of(folder: Path, workers: int, start_sample: int = 0, batch: int = BATCH) -> Iterator[torch.Tensor]:
    return step_batches(
        TokenDataset.open(folder),
        seed=0,
        start_sample=start_sample,
        global_batch_size=batch,
        dp_rank=0,
        dp_size=1,
        num_workers=workers,
    )


class MemmapRows(Dataset[torch.Tensor]):
    """Random rows of one flat file: the least that any reader must do. Nothing is checked."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self._path, self._shape = path, shape
        self._rows: np.memmap[Any, Any] | None = None

    def __getitems__(self, ids: list[int]) -> torch.Tensor:
        if self._rows is None:
            self._rows = np.memmap(self._path, dtype="<u2", mode="r", shape=self._shape)
        out = np.empty((len(ids), self._shape[1]), dtype=np.int64)
        for number, row in enumerate(ids):
            out[number] = self._rows[row]
        return torch.from_numpy(out)


class RandomBatches:
    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(self._count)
            for first in range(0, self._count - BATCH, BATCH):
                yield order[first : first + BATCH].tolist()


def as_it_is(batch: Any) -> Any:
    return batch


def memmap_reader(path: Path, shape: tuple[int, int], workers: int) -> Iterator[torch.Tensor]:
    options: dict[str, Any] = {"prefetch_factor": 4, "multiprocessing_context": "spawn"} if workers else {}
    dataset = MemmapRows(path, shape)
    batches: Any = RandomBatches(shape[0])
    return iter(DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=as_it_is, **options))


def tokens_of(sample: dict[str, Any]) -> npt.NDArray[np.int64]:
    return np.frombuffer(sample["bin"], dtype="<u2").astype(np.int64)


def stacked(rows: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


def webdataset_reader(pattern: str, workers: int) -> Iterator[torch.Tensor]:
    """As its documentation shows it: one sequence a member, shards shuffled, rows through a buffer."""
    data = (
        webdataset.WebDataset(pattern, shardshuffle=16, seed=0, empty_check=False)
        .shuffle(1000)
        .map(tokens_of)
        .batched(BATCH, collation_fn=stacked, partial=False)
        .repeat()
    )
    options: dict[str, Any] = {"prefetch_factor": 4, "multiprocessing_context": "spawn"} if workers else {}
    return iter(DataLoader(data, batch_size=None, num_workers=workers, **options))


def write_webdataset(folder: Path, rows: npt.NDArray[np.uint16]) -> str:
    folder.mkdir()
    count = 0
    for first in range(0, len(rows), MEMBER_ROWS * SHARD_MEMBERS):
        with webdataset.TarWriter(str(folder / f"{count:06d}.tar")) as writer:
            for number, row in enumerate(rows[first : first + MEMBER_ROWS * SHARD_MEMBERS]):
                writer.write({"__key__": f"{first + number:09d}", "bin": row.tobytes()})
        count += 1
    return f"{folder}/{{000000..{count - 1:06d}}}.tar"


@dataclass
class Rate:
    """The best of several rounds."""

    by_clock: float = 0.0
    by_cpu: float = 0.0

    def add(self, tokens: int, clock: float, cpu: float) -> None:
        self.by_clock = max(self.by_clock, tokens / clock / 1e6)
        self.by_cpu = max(self.by_cpu, tokens / cpu / 1e6)


def cpu_seconds() -> float:
    """Of this process and its workers."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(each.user + each.system for each in times)


def rates(readers: dict[str, Iterator[Any]], tokens_per_batch: int, batches: int, rounds: int) -> dict[str, Rate]:
    """Readers take turns, so that what else the machine does meets them alike."""
    for reader in readers.values():
        next(reader)
    found = {name: Rate() for name in readers}
    for _ in range(rounds):
        for name, reader in readers.items():
            clock, cpu = time.perf_counter(), cpu_seconds()
            for _ in range(batches):
                next(reader)
            found[name].add(batches * tokens_per_batch, time.perf_counter() - clock, cpu_seconds() - cpu)
    return found


def rates_table(rows: int, seq_length: int, batches: int, rounds: int, with_mosaic: bool, scratch: Path) -> str:
    """Every reader gives int64 batches of 32 random rows to the same process, through torch's loader with workers."""
    data = made_up_rows(rows, seq_length)
    folder = write_folder(scratch / "ours", data)
    flat = scratch / "rows.bin"
    data.tofile(flat)
    pattern = write_webdataset(scratch / "plain", data)
    lines = [
        f"{rows} rows of {seq_length} tokens, warm; best of {rounds} rounds of {batches} batches of {BATCH}.",
        "",
        "| workers | reader | Mtok/s per worker | Mtok per CPU second | against np.memmap | against WebDataset |",
        "|---|---|---|---|---|---|",
    ]
    for workers in (0, 1, 2):
        readers: dict[str, Iterator[Any]] = {
            "data_pipeline": reader_of(folder, workers),
            "np.memmap random rows": memmap_reader(flat, data.shape, workers),
            "plain WebDataset": webdataset_reader(pattern, workers),
        }
        found = rates(readers, BATCH * seq_length, batches, rounds)
        readers.clear()
        if with_mosaic:
            found["MosaicML streaming"] = mosaic_rate(scratch, data, workers, batches, rounds)
        memmap, plain = found["np.memmap random rows"], found["plain WebDataset"]
        for name, rate in found.items():
            ratios = " | ".join(
                f"{rate.by_clock / base.by_clock:.2f} ({rate.by_cpu / base.by_cpu:.2f} by CPU)"
                for base in (memmap, plain)
            )
            lines.append(
                f"| {workers} | {name} | {rate.by_clock / max(1, workers):.1f} | {rate.by_cpu:.1f} | {ratios} |"
            )
    return "\n".join(lines)


MOSAIC_SCRIPT = """
import sys, time
import numpy as np, psutil, torch
from torch.utils.data import DataLoader
from streaming import MDSWriter, StreamingDataset

if __name__ == "__main__":
    flat, columns, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    workers, batches, rounds = map(int, sys.argv[4:])
    rows = np.fromfile(flat, dtype="<u2").reshape(-1, columns)
    import os
    if not os.path.exists(folder):
        with MDSWriter(out=folder, columns={"tokens": f"ndarray:uint16:{columns}"}) as out:
            for row in rows:
                out.write({"tokens": row})
    data = StreamingDataset(local=folder, shuffle=True, batch_size=32)
    def stack(samples):
        return torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))
    def endless():
        while True:
            yield from DataLoader(data, batch_size=32, num_workers=workers, collate_fn=stack, drop_last=True,
                                  **({"prefetch_factor": 4} if workers else {}))
    reader = endless()
    next(reader)
    def cpu():
        own = psutil.Process()
        return sum(t.user + t.system for t in (p.cpu_times() for p in [own, *own.children(recursive=True)]))
    for _ in range(rounds):
        clock, before = time.perf_counter(), cpu()
        for _ in range(batches):
            next(reader)
        print("rate", time.perf_counter() - clock, cpu() - before, flush=True)
"""


def mosaic_rate(scratch: Path, data: npt.NDArray[np.uint16], workers: int, batches: int, rounds: int) -> Rate:
    """In a folder of packages of its own: it would replace torch and numpy with other versions."""
    packages = scratch / "mosaic-packages"
    if not packages.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *MOSAIC]
        subprocess.run(pip, check=True)
        for name, text in VISION.items():
            (packages / "torchvision" / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / "torchvision" / name).write_text(text)
    script = scratch / "mosaic.py"
    script.write_text(MOSAIC_SCRIPT)
    numbers = [data.shape[1], scratch / "mds", workers, batches, rounds]
    command = [sys.executable, str(script), str(scratch / "rows.bin"), *map(str, numbers)]
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
    )
    rate = Rate()
    for line in done.stdout.splitlines():
        if line.startswith("rate "):
            clock, cpu = map(float, line.split()[1:])
            rate.add(batches * BATCH * (data.shape[1] - 1), clock, cpu)
    return rate


def best(function: Callable[[], None], rounds: int) -> float:
    """Seconds, the least of several rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def resume_table(samples: int, rounds: int, scratch: Path) -> str:
    """An index of that many samples, whose entries share the members of a small folder."""
    rows = made_up_rows(64 * MEMBER_ROWS, 2048)
    folder = write_folder(scratch / "large", rows, repeat=-(-samples // len(rows)))
    dataset = TokenDataset.open(folder)
    start = dataset.num_samples * 3 // 2

    def first_batch(data: TokenDataset) -> None:
        options = {"seed": 0, "global_batch_size": BATCH, "dp_rank": 0, "dp_size": 1, "num_workers": 0}
        next(step_batches(data, start_sample=start, **options))  # type: ignore[arg-type]

    whole = best(lambda: first_batch(TokenDataset.open(folder)), rounds)
    reading = best(lambda: first_batch(_forgetful(dataset)), rounds)
    return "\n".join(
        [
            f"{dataset.num_samples} samples, resumed at position {start}; best of {rounds} rounds.",
            "",
            "| from | to the first batch of 32, ms |",
            "|---|---|",
            f"| the folder's name (manifest and index of {dataset._index.nbytes / 1e6:.0f} MB read and hashed) "
            f"| {whole * 1e3:.1f} |",
            f"| an open folder | {reading * 1e3:.1f} |",
        ]
    )


def _forgetful(dataset: TokenDataset) -> TokenDataset:
    """The same, with no member kept from before."""
    dataset._members.clear()
    return dataset


def memory_table(batches: int, scratch: Path) -> str:
    """Small rows, many members and shards, so that everything that could grow is met often."""
    folder = write_folder(scratch / "small", made_up_rows(200_000, 4))
    reader = reader_of(folder, workers=0, batch=8)
    process = psutil.Process()
    lines = ["| batches | resident MB |", "|---|---|"]
    done = 0
    for until in (batches // 100, batches // 10, batches // 2, batches):
        while done < until:
            next(reader)
            done += 1
        lines.append(f"| {done} | {process.memory_info().rss / 1e6:.1f} |")
    return "\n".join(lines)


def waiting_table(run: Path) -> str:
    """From the run's own measurements, the first logged step left out: nothing is prefetched yet there."""
    logged = [record for record in read_metrics(run / "metrics.jsonl") if "data_seconds" in record][1:]
    waited, spent = (sum(record[key] for record in logged) for key in ("data_seconds", "step_seconds"))
    share = 100 * waited / spent
    return f"{run}: {share:.3f}% of the step time spent waiting for data, over {len(logged)} logged steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["rates", "resume", "memory", "waiting"])
    parser.add_argument("run", nargs="?", type=Path, help="waiting: a run folder")
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--mosaic", action="store_true", help="MosaicML streaming too; installs it into a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if options.part == "rates":
            sizes = options.rows, options.seq_length, options.batches, options.rounds
            print(rates_table(*sizes, options.mosaic, scratch))
        elif options.part == "resume":
            print(resume_table(10**8, options.rounds, scratch))
        elif options.part == "memory":
            print(memory_table(10**5, scratch))
        elif options.run is None:
            parser.error("waiting needs a run folder")
        else:
            print(waiting_table(options.run))


if __name__ == "__main__":
    main()
