"""Encoding with processes: the same bytes for any number of them, and after an interruption; faults are listed."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline import pool
from data_pipeline.documents import iter_documents
from data_pipeline.encode import Reading, encode_items
from data_pipeline.errors import UserError
from data_pipeline.faults import Fault
from data_pipeline.index import Manifest
from data_pipeline.inputs import find_files
from data_pipeline.pool import Corpus
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.spool import Spool, load_summary
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.units import plan_units
from tests.commands import environment

pytestmark = pytest.mark.unit

UNIT_BYTES = 4000


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.units.SMALLEST_UNIT_BYTES", UNIT_BYTES)


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """Every kind of file, with more bytes than a unit in those that can be cut."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(rows[:120]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[120:160]).encode(), mtime=0))
    table = pyarrow.table({"text": texts[160:280]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=10, compression="none")
    for number, text in enumerate(texts[280:300]):
        (folder / f"d{number:02d}.txt").write_text(text)
    return folder


def corpus_of(folder: Path, *, skip_faults: bool = False) -> Corpus:
    return Corpus(find_files([str(folder)]), Reading(skip_faults=skip_faults))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def documents_of(folder: Path) -> list[str]:
    return sorted(text for split in ("train", "validation") for text in iter_documents(folder, split))


def write(
    output: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    on_read: Callable[[int], None] | None = None,
) -> list[str]:
    """Returns what the user is told."""
    said: list[str] = []
    write_data_folder(
        output,
        corpus,
        tokenizer,
        Layout(32, validation_fraction=0.2),
        workers=workers,
        on_bytes=on_read or (lambda num_bytes: None),
        say=said.append,
    )
    return said


def test_units_cut_what_can_be_cut(corpus: Path) -> None:
    files = find_files([str(corpus)])
    units = plan_units(files)
    extents = [extent for unit in units for extent in unit.extents]
    by_name = {Path(file.name).name: [e for e in extents if e.file == file] for file in files.files}
    assert len(by_name["a.jsonl"]) > 3
    assert len(by_name["b.jsonl.gz"]) == 1
    assert len(by_name["c.parquet"]) > 3
    for name in ("a.jsonl", "c.parquet"):
        bounds = [(extent.start, extent.stop) for extent in by_name[name]]
        assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
        assert bounds[0][0] == 0
    assert by_name["a.jsonl"][-1].stop is None
    assert by_name["c.parquet"][-1].stop == 12
    assert sum(unit.num_bytes for unit in units) == pytest.approx(files.num_bytes, abs=20)
    assert len({unit.key("x") for unit in units} | {unit.key("y") for unit in units}) == 2 * len(units)


def test_workers_change_no_byte(tmp_path: Path, corpus: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    read: list[int] = []
    assert write(tmp_path / "one", corpus_of(corpus), tokenizer, on_read=read.append) == []
    assert sum(read) == sum(unit.num_bytes for unit in plan_units(find_files([str(corpus)])))
    assert write(tmp_path / "two", corpus_of(corpus), tokenizer, workers=2) == []
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert documents_of(tmp_path / "one") == sorted(texts[:300])


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the units that are encoded from now on, in this process."""
    keys: list[str] = []
    encode = pool.encode_unit

    def counting(unit: object, key: str, *rest: object) -> object:
        keys.append(key)
        return encode(unit, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "encode_unit", counting)
    return keys


def test_an_interrupted_run_continues(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole", corpus_of(corpus), tokenizer)
    num_units = len(plan_units(find_files([str(corpus)])))
    encoded = count_encoded(monkeypatch)

    def interrupt(num_bytes: int) -> None:
        if len(encoded) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", corpus_of(corpus), tokenizer, on_read=interrupt)
    assert not (tmp_path / "data").exists()
    said = write(tmp_path / "data", corpus_of(corpus), tokenizer)
    assert said == [f"continuing an interrupted run: 4 of {num_units} parts are encoded already"]
    assert len(encoded) == num_units + 1
    assert len(set(encoded)) == num_units
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "data", "whole"}


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from data_pipeline import units
from data_pipeline.encode import Reading
from data_pipeline.inputs import find_files
from data_pipeline.pool import Corpus
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import Tokenizer

def die_when_some_are_done(num_bytes):
    if len(list(output.parent.glob(".data.partial/spool/*.json"))) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    corpus, model, output, unit_bytes, workers = sys.argv[1:]
    output = Path(output)
    units.SMALLEST_UNIT_BYTES = int(unit_bytes)
    layout = Layout(32, validation_fraction=0.2)
    source = Corpus(find_files([corpus]), Reading())
    write_data_folder(
        output, source, Tokenizer.load(Path(model)), layout, workers=int(workers), on_bytes=die_when_some_are_done
    )
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_continues(tmp_path: Path, corpus: Path, tokenizer: Tokenizer, workers: int) -> None:
    (tmp_path / "killed.py").write_text(KILLED_RUN)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    arguments = [corpus, tmp_path / "tokenizer.model", tmp_path / "data", UNIT_BYTES, workers]
    done = subprocess.run(
        [sys.executable, tmp_path / "killed.py", *map(str, arguments)], env=environment(), timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".data.partial").is_dir()
    (said,) = write(tmp_path / "data", corpus_of(corpus), tokenizer)
    kept = re.fullmatch(r"continuing an interrupted run: (\d+) of \d+ parts are encoded already", said)
    assert kept
    assert int(kept[1]) >= 3
    write(tmp_path / "whole", corpus_of(corpus), tokenizer)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")


def test_what_changed_is_encoded_again_and_said(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the last file is broken: all units before it stay
    (corpus / "z.txt").write_bytes(b"\xff" * UNIT_BYTES)
    num_units = len(plan_units(find_files([str(corpus)])))
    with pytest.raises(UserError, match=r"z\.txt:1: invalid UTF-8"):
        write(tmp_path / "data", corpus_of(corpus), tokenizer)
    (corpus / "z.txt").write_text("mended " * (UNIT_BYTES // 7 + 1))
    encoded = count_encoded(monkeypatch)
    said = write(tmp_path / "data", corpus_of(corpus), tokenizer)
    assert said == [f"continuing an interrupted run: {num_units - 1} of {num_units} parts are encoded already"]
    assert len(encoded) == 1
    assert "mended mended" in "".join(documents_of(tmp_path / "data"))

    (corpus / "z.txt").write_bytes(b"\xff")
    with pytest.raises(UserError):
        write(tmp_path / "other", corpus_of(corpus), tokenizer)
    left = len(list((tmp_path / ".other.partial" / "spool").glob("*.json")))
    assert left > 4
    said = write(tmp_path / "other", corpus_of(corpus, skip_faults=True), tokenizer)
    assert said[0] == f"not used: {left} parts of an interrupted run, whose command or input files were not the same"
    assert not any("continuing" in line for line in said)
    assert documents_of(tmp_path / "other") == sorted(texts[:300])


def test_a_file_that_was_written_again_is_read_again(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its size is the same: the time of its last change differs."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("data_pipeline.shards._write_splits", interrupt)
        write(tmp_path / "data", corpus_of(corpus), tokenizer)
    file = corpus / "d00.txt"
    before = file.stat()
    file.write_text("z" * before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    num_units = len(plan_units(find_files([str(corpus)])))
    assert write(tmp_path / "data", corpus_of(corpus), tokenizer) == [
        "not used: 1 parts of an interrupted run, whose command or input files were not the same",
        f"continuing an interrupted run: {num_units - 1} of {num_units} parts are encoded already",
    ]
    assert "z" * before.st_size in documents_of(tmp_path / "data")


def test_a_part_that_is_not_whole_is_not_trusted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    encode_items([Document("one two", "a"), Document("three", "b")], "key", tokenizer, tmp_path)
    dtype = np.dtype("<u2")
    assert load_summary(tmp_path, "key", dtype) is not None
    for name, content in (("key.tokens", b"\0\0"), ("key.npy", b"x"), ("key.json", b"{}")):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        assert load_summary(tmp_path, "key", dtype) is None
        (tmp_path / name).write_bytes(before)


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_documents_are_counted_and_listed(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, texts: list[str], workers: int
) -> None:
    (corpus / "bad.jsonl").write_bytes(
        b'{"text": "good row"}\n' + b"{\n" * 2 + b'{"text": ""}\n{"text": "\xff"}\n' + b"{\n" * 2
    )
    (corpus / "nul.txt").write_bytes(b"a\0b")
    # the fault lies behind several blocks that are encoded by then
    (corpus / "late.txt").write_bytes(b"seven tall ships\n" * 150_000 + b"\xe9")
    with pytest.raises(UserError, match=r"^\S+:\d+: [^\n]+$"):
        write(tmp_path / "stopped", corpus_of(corpus), tokenizer, workers=workers)
    said = write(tmp_path / "data", corpus_of(corpus, skip_faults=True), tokenizer, workers=workers)
    assert said == [
        f"skipped 4 x broken JSON: {corpus}/bad.jsonl:2, {corpus}/bad.jsonl:3, {corpus}/bad.jsonl:6, ...",
        f"skipped 1 x empty document: {corpus}/bad.jsonl:4",
        f"skipped 2 x invalid UTF-8: {corpus}/bad.jsonl:5, {corpus}/late.txt:150001",
        "1 documents hold NUL characters, which are kept as they are",
        f"all of them are listed in {tmp_path}/data/skipped.jsonl",
    ]
    listed = [json.loads(line) for line in (tmp_path / "data" / "skipped.jsonl").read_text().splitlines()]
    lines = [2, 3, 4, 5, 6, 7]
    assert [row["place"] for row in listed] == [
        *(f"{corpus}/bad.jsonl:{n}" for n in lines),
        f"{corpus}/late.txt:150001",
    ]
    assert listed[3] == {
        "kind": "invalid UTF-8",
        "place": f"{corpus}/bad.jsonl:5",
        "message": "invalid UTF-8 (byte 0xFF)",
    }
    skipped = {"broken JSON": 4, "empty document": 1, "invalid UTF-8": 2}
    assert Manifest.load(tmp_path / "data").build["skipped"] == skipped
    assert documents_of(tmp_path / "data") == sorted([*texts[:300], "good row", "a\0b"])


def test_a_fault_takes_back_the_document_that_was_begun(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = "old walls\n" * 5000
    fault = Fault("invalid UTF-8", "b.txt:1", "invalid UTF-8")
    items = [Document("one", "a"), Document(long, "b", continues=True), fault, Document("two", "c")]
    summary = encode_items(items, "key", tokenizer, tmp_path, skip_faults=True)
    spool = Spool(tmp_path, ["key"], np.dtype("<u2"))
    counts = spool.documents["tokens"].tolist()
    found = [tokenizer.decode(spool.read(n, 0, count).tolist()) for n, count in enumerate(counts)]
    assert found == ["one", "two"]
    assert summary.tokens == sum(counts) == (tmp_path / "key.tokens").stat().st_size // 2
    assert spool.documents["characters"].tolist() == [3, 3]


def test_a_part_without_documents_is_fine(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fault = Fault("empty file", "a.txt", "the file is empty")
    encode_items([fault], "none", tokenizer, tmp_path, skip_faults=True)
    encode_items([Document("one", "a")], "some", tokenizer, tmp_path)
    assert load_summary(tmp_path, "none", np.dtype("<u2")) is not None
    assert len(Spool(tmp_path, ["none", "some", "none"], np.dtype("<u2")).documents) == 1


def test_few_files_are_open_at_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.spool._FILES_KEPT", 3)
    keys = [str(number) for number in range(10)]
    for key in keys:
        encode_items([Document(f"number {key}", key)], key, tokenizer, tmp_path)
    spool = Spool(tmp_path, keys, np.dtype("<u2"))
    before = len(os.listdir("/proc/self/fd"))
    for number in [*range(10), *range(10)]:
        count = int(spool.documents["tokens"][number])
        assert tokenizer.decode(spool.read(number, 0, count).tolist()) == f"number {number}"
    assert len(os.listdir("/proc/self/fd")) == before + 3
    spool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_is_killed_ends_the_command_in_one_line(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    def kill_a_worker(num_bytes: int) -> None:
        for process in _children():
            os.kill(process, signal.SIGKILL)

    with pytest.raises(UserError, match="a worker process was killed"):
        write(tmp_path / "data", corpus_of(corpus), tokenizer, workers=2, on_read=kill_a_worker)


def _children() -> list[int]:
    import multiprocessing

    return [process.pid for process in multiprocessing.active_children() if process.pid]


MEASURED_RUN = """
import resource, sys
from pathlib import Path
from data_pipeline.encode import Reading, encode_unit
from data_pipeline.inputs import find_files
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.units import plan_units

tokenizer = Tokenizer.load(Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(unit,) = plan_units(find_files([sys.argv[1]]))
summary = encode_unit(unit, "key", Reading(), tokenizer, Path(sys.argv[3]))
print(summary.tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def measure_one_document(folder: Path, tokenizer: Tokenizer, num_lines: int) -> tuple[int, int]:
    """Tokens of a document of so many 17-byte lines, and the MiB that encoding it takes at the most."""
    (folder / "measure.py").write_text(MEASURED_RUN)
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    with (folder / "long.txt").open("w") as file:
        for _ in range(num_lines // 1000):
            file.write("seven tall ships\n" * 1000)
    (folder / "out").mkdir()
    arguments = [folder / "measure.py", folder / "long.txt", folder / "tokenizer.model", folder / "out"]
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=True)
    tokens, mebibytes = done.stdout.split()
    return int(tokens), int(mebibytes)


def test_a_long_document_takes_little_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokens, mebibytes = measure_one_document(tmp_path, tokenizer, 1_000_000)  # 17 MB
    assert tokens == 1_000_000 * len(tokenizer.encode("seven tall ships\n"))
    assert mebibytes < 15


@pytest.mark.slow
def test_half_a_gigabyte_in_one_document_takes_no_more(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokens, mebibytes = measure_one_document(tmp_path, tokenizer, 30_000_000)
    assert tokens == 30_000_000 * len(tokenizer.encode("seven tall ships\n"))
    assert mebibytes < 15
