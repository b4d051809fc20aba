"""`data order` names what a run reads, and the commands that look at data read URLs too."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.batches import step_batches
from data_pipeline.cli import main
from data_pipeline.mixture import Mixture, sources_of
from data_pipeline.stream import TokenDataset
from tests.unit.data.damage import SHARD, flip_payload
from tests.unit.data.servers import FileServer

pytestmark = pytest.mark.unit

Run = Callable[..., tuple[int, str]]
LINE = re.compile(r"position (\d+) epoch (\d+) sample (\d+): (\S+) member (\d{9}\.bin) row (\d+)")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments) -> exit status, stdout and stderr"""

    def command(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return command


@pytest.fixture
def server(shared_folder: Path) -> Iterator[FileServer]:
    server = FileServer(shared_folder.parent)
    yield server
    server.close()


def stored_row(line: str) -> list[int]:
    """The row that a line of `data order` names, with nothing but the standard library's tar reader."""
    match = LINE.fullmatch(line)
    assert match is not None, line
    with tarfile.open(match[4]) as archive:
        member = archive.extractfile(match[5])
        assert member is not None
        return np.frombuffer(member.read(), dtype="<u2").reshape(-1, 17)[int(match[6])].tolist()


def test_the_lines_name_what_a_run_reads(shared_folder: Path, run: Run) -> None:
    dataset = TokenDataset.open(shared_folder)
    n = dataset.num_samples
    status, out = run("order", shared_folder, "--from", n - 4, "--count", 8, "--seed", 6)
    assert status == 0
    lines = out.splitlines()
    reader = step_batches(dataset, seed=6, start_sample=n - 4, global_batch_size=8, dp_rank=0, dp_size=1, num_workers=0)
    assert [stored_row(line) for line in lines] == next(reader).tolist()
    named = [LINE.fullmatch(line).groups() for line in lines]  # type: ignore[union-attr]
    assert [int(fields[0]) for fields in named] == list(range(n - 4, n + 4))
    assert [int(fields[1]) for fields in named] == [0] * 4 + [1] * 4
    assert all(
        dataset.rows([int(fields[2])])[0].tolist() == stored_row(line)
        for fields, line in zip(named, lines, strict=True)
    )


def test_the_lines_of_a_mixture(
    shared_folder: Path, tmp_path: Path, write: Callable[..., Path], texts: list[str], run: Run
) -> None:
    other = write(tmp_path / "other", texts[:60])
    status, out = run("order", shared_folder, other, "--weights", "0.25,0.75", "--from", 500, "--count", 40)
    assert status == 0
    lines = out.splitlines()
    mixture = Mixture.open(sources_of([(str(shared_folder), 1, "a"), (str(other), 3, "b")]))
    reader = step_batches(mixture, seed=0, start_sample=500, global_batch_size=40, dp_rank=0, dp_size=1, num_workers=0)
    assert [stored_row(line) for line in lines] == next(reader).tolist()
    epochs = {int(LINE.fullmatch(line)[2]) for line in lines if str(other) in line}  # type: ignore[index]
    assert min(epochs) >= 375 // TokenDataset.open(other).num_samples > 0, "the small source is in a later epoch"


@pytest.mark.parametrize("weights", ["1", "1,x", "1,0", "1,inf", "1,-1"])
def test_weights_that_are_none(shared_folder: Path, run: Run, weights: str) -> None:
    status, out = run("order", shared_folder, shared_folder, "--weights", weights)
    assert (status, out) == (2, f"error: --weights must be 2 positive numbers with commas between (got {weights})\n")


def test_the_commands_read_urls(server: FileServer, shared_folder: Path, tmp_path: Path, run: Run) -> None:
    url, cache = f"{server.url}/{shared_folder.name}", ("--cache-dir", tmp_path / "cache")
    assert run("info", url, *cache) == run("info", shared_folder)
    assert run("sample", url, *cache) == run("sample", shared_folder)
    status, out = run("order", url, *cache, "--count", 3)
    assert (status, out) == (0, run("order", shared_folder, "--count", 3)[1].replace(str(shared_folder), url))
    status, out = run("verify", url, *cache)
    assert status == 0
    assert out.startswith(f"{url} is whole: ")
    status, out = run("info", f"{url}/nothing", *cache)
    assert (status, out) == (2, f"error: {url}/nothing is not a data folder: it has no manifest.json\n")


def test_verify_names_damage_behind_a_url(server: FileServer, shared_folder: Path, tmp_path: Path, run: Run) -> None:
    import shutil

    copy = Path(shutil.copytree(shared_folder, tmp_path / "copy"))
    (member,) = flip_payload(copy)
    server.folder = tmp_path
    status, out = run("verify", f"{server.url}/copy", "--cache-dir", tmp_path / "cache")
    said = f"damaged: {server.url}/copy/{SHARD} member {member:09d}.bin: its payload's crc32 differs"
    assert status == 1
    assert said in out.splitlines()
