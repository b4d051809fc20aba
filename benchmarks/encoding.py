"""What `fastslow data shard` costs: its rate per process beside sentencepiece's own, and the memory of all processes.

python benchmarks/encoding.py rate              MB/s of 1 and 2 workers against sentencepiece in one process
python benchmarks/encoding.py memory --gb 1     resident memory while a made-up corpus of that size is sharded
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil
import sentencepiece

from data_pipeline.encode import Reading
from data_pipeline.inputs import find_files
from data_pipeline.pool import Corpus, encode_corpus
from data_pipeline.readers import read_documents
from data_pipeline.tokenizer import MODEL_NAME, train_tokenizer

_VOCAB_SIZE = 8192
_SECONDS_BETWEEN_SAMPLES = 0.2


def interpreter_sources() -> list[str]:
    """Code that is always at hand: the interpreter's own standard library, without its tests and what was installed."""
    library = Path(random.__file__).parent
    return [f"{library}/*.py", *(f"{library}/{name}/**/*.py" for name in ("asyncio", "email", "idlelib", "unittest"))]


def made_up_documents(num_bytes: int, seed: int = 0) -> Iterator[str]:
    """Documents of lines of made-up words, a few KB each, until `num_bytes` are reached."""
    rng = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(1, 11))) for _ in range(50_000)]
    frequency = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    lines = [" ".join(rng.choices(words, cum_weights=frequency, k=rng.randint(4, 20))) for _ in range(50_000)]
    done = number = 0
    while done < num_bytes:
        text = f"{number}\n" + "\n".join(rng.choices(lines, k=rng.randint(5, 100))) + "\n"
        yield text
        done += len(text)
        number += 1


def write_rows(folder: Path, num_bytes: int, num_files: int, seed: int = 0) -> int:
    """.jsonl files; returns their size in bytes."""
    folder.mkdir()
    total = 0
    for number in range(num_files):
        with (folder / f"{number:03d}.jsonl").open("w") as file:
            for text in made_up_documents(num_bytes // num_files, seed + number):
                total += file.write(json.dumps({"text": text}) + "\n")
    return total


def shard(corpus: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, int]:
    """Run the command to its end; seconds, and the largest resident memory of all its processes together."""
    arguments = ["--input", corpus, "--tokenizer", tokenizer, "--seq-len", 2048, "--output", output]
    command = [
        sys.executable,
        "-m",
        "data_pipeline.cli",
        "shard",
        *arguments,
        "--workers",
        workers,
        "--on-error",
        "skip",
    ]
    start = time.perf_counter()
    peak = 0
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL) as process:
        family = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _resident(family))
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
    if process.returncode:
        sys.exit(f"data shard ended with status {process.returncode}")
    return time.perf_counter() - start, peak


def _resident(family: psutil.Process) -> int:
    total = 0
    try:
        for process in [family, *family.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of CPU time in this process and its ended children."""

    clock: float
    cpu: float


@contextmanager
def measured(costs: list[Cost]) -> Iterator[None]:
    """Append what the block costs."""
    clock, cpu = time.perf_counter(), _cpu_seconds()
    yield
    costs.append(Cost(time.perf_counter() - clock, _cpu_seconds() - cpu))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def encode_with_the_library(texts: list[str], model: bytes) -> None:
    """sentencepiece alone: one document a call, one thread, the texts in memory."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in texts:
        processor.encode(text)


def encoding_table(corpora: dict[str, list[str]], max_workers: int = 2) -> Iterator[str]:
    """The lines of a table of rates, in one run on one machine.

    "encoding" is the part of `data shard` that several processes share: starting them, reading, unpacking, checking,
    hashing, encoding and writing the spool. "all" adds shuffling, packing, shards and checksums. Ratios compare bytes
    per second of CPU time, so that they hold on a machine that is busy with other things; rates are by the clock.
    """
    # here, because every worker imports this module, and these lead to torch, which the command's workers do without
    from data_pipeline.shards import Layout, write_data_folder

    yield "| corpus | model | MB | what | processes | per CPU second / sentencepiece | MB/s | sentencepiece MB/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, inputs in corpora.items():
        files = find_files(inputs)
        corpus = Corpus(files, Reading(skip_faults=True))
        texts = [document.text for document in read_documents(files.files, on_fault=lambda fault: None)]
        size = sum(len(text.encode()) for text in texts)
        for model in ("bpe", "unigram"):
            trained, _ = train_tokenizer(texts[:: max(1, len(texts) // 300)], _VOCAB_SIZE, model)  # type: ignore[arg-type]
            costs: list[Cost] = []
            with measured(costs):
                encode_with_the_library(texts, trained.model)
            for what, workers in (("all", 1), *(("encoding", number + 1) for number in range(max_workers))):
                with tempfile.TemporaryDirectory() as scratch, measured(costs):
                    if what == "encoding":
                        encode_corpus(corpus, trained, Path(scratch), workers)
                    else:
                        write_data_folder(Path(scratch) / "out", corpus, trained, Layout(2048), workers=workers)
                ratio = costs[0].cpu / costs[-1].cpu
                rates = f"{size / costs[-1].clock / 1e6:.2f} | {size / costs[0].clock / 1e6:.2f}"
                yield f"| {name} | {model} | {size / 1e6:.0f} | {what} | {workers} | {ratio:.2f} | {rates} |"


def memory_table(num_bytes: int, workers: int, scratch: Path) -> str:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        size = write_rows(folder / "corpus", num_bytes, num_files=4)
        sample = [text for _, text in zip(range(1000), made_up_documents(num_bytes), strict=False)]
        trained, _ = train_tokenizer(sample, _VOCAB_SIZE, "unigram")
        (folder / MODEL_NAME).write_bytes(trained.model)
        seconds, peak = shard(folder / "corpus", folder, folder / "out", workers)
    finally:
        shutil.rmtree(folder)
    lines = ["| corpus GB | workers | peak memory, all processes, GB | MB/s |", "|---|---|---|---|"]
    lines.append(f"| {size / 1e9:.2f} | {workers} | {peak / 1e9:.2f} | {size / seconds / 1e6:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rate", "memory"])
    parser.add_argument("--mb", type=float, default=60, help="size of the made-up corpus of `rate`")
    parser.add_argument("--gb", type=float, default=1, help="size of the corpus of `memory`")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where corpus and shards go")
    options = parser.parse_args()
    if options.what == "memory":
        print(memory_table(int(options.gb * 1e9), options.workers, options.scratch))
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        rows = Path(scratch) / "rows"
        write_rows(rows, int(options.mb * 1e6), num_files=4)
        corpora = {"made up, .jsonl": [str(rows)], "standard library": interpreter_sources()}
        for line in encoding_table(corpora, options.workers):
            print(line, flush=True)


if __name__ == "__main__":
    main()
