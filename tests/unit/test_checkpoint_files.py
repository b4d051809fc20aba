"""Checkpoints on disk: kills at every moment, damage of every kind, retention, and reading without an engine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.errors import UserError
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train.checkpoint_files import find_checkpoint
from fastslow_scale.train.checkpoint_reader import CheckpointReader, piece_key, rank_state_key

pytestmark = pytest.mark.unit

FILE_OPERATIONS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


def write_checkpoint(folder: Path, step: int, note: str = "", keep: int = 2, keep_every: int = 0) -> Path:
    """What two tensor-parallel ranks save: a sharded [4, 3] that counts up from `step`, and a replicated [5]."""
    saving = files.begin(folder, step)
    sharded = torch.arange(step, step + 12.0).view(4, 3)
    entries = {}
    for tp_rank, shard in enumerate(sharded.chunk(2)):
        flat = shard.flatten()
        tensors = {
            piece_key("sharded", "fp32", 0): flat[:2],
            piece_key("sharded", "fp32", 2): flat[2:],
            piece_key("sharded", "exp_avg", 0): flat / 2,
            rank_state_key("rng"): torch.tensor([tp_rank], dtype=torch.uint8),
        }
        if tp_rank == 1:
            tensors[piece_key("whole", "fp32", 0)] = torch.full((5,), float(step))
        name = f"tp{tp_rank}_dp0.safetensors"
        entries[name] = {**files.write_tensors(saving / name, tensors), "tp_rank": tp_rank, "dp_rank": 0}
    parameters = {
        "sharded": {"index": 0, "shape": [4, 3], "tp_dim": 0, "trained": True, "adam_step": step},
        "whole": {"index": 1, "shape": [5], "tp_dim": None, "trained": False, "adam_step": None},
    }
    manifest = {
        "step": step,
        "layout": {"tp_size": 2, "dp_size": 1, "zero_stage": 1},
        "parameters": parameters,
        "engine": {},
        "state": {"note": note, 1: [0.1, None]},
        "files": entries,
    }
    return files.commit(saving, manifest, keep, keep_every)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- kills ---------------------------------------------------------------------------------------------------------


def killed_at(operation: int, action: Callable[[], Any]) -> bool:
    """Does `action` in a child that is killed just before its file operation of this number. False: it has fewer."""
    child = os.fork()
    if child == 0:
        die_at(operation)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def die_at(operation: int) -> None:
    left = [operation]

    def counted(function: Callable[..., Any], last_words: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                last_words(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    def half_of_it(file: Any, digest: Any, content: bytes | memoryview) -> None:
        file.write(content[: len(content) // 2])

    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name), lambda *args: None))
    files.write_chunk = counted(files.write_chunk, half_of_it)


@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "the same step again"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, step: int) -> None:
    before = tmp_path / "before"
    write_checkpoint(before, 10, "old")
    write_checkpoint(before, 20, "old")
    operation, seen = 0, set()
    while True:
        folder = tmp_path / f"kill_{operation}"
        shutil.copytree(before, folder)
        if not killed_at(operation, lambda folder=folder: write_checkpoint(folder, step, "new")):
            break
        found, passed_over = find_checkpoint(folder)
        assert found is not None and not passed_over, (operation, names_in(folder))
        reader = CheckpointReader(found)
        seen.add(reader.state["note"])
        assert reader.step == (step if reader.state["note"] == "new" else 20)
        assert reader.full("sharded")[0, 0] == reader.step
        latest = (folder / "latest").read_text().strip()
        assert (folder / latest).exists() or (folder / f"{latest}.replaced").exists()
        write_checkpoint(folder, 40, "next")
        assert names_in(folder) == ["latest", found.name.removesuffix(".replaced"), "step_00000040"], operation
        operation += 1
    assert seen == {"old", "new"}
    assert operation > 15


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any) -> Any:
            paths = [os.readlink(f"/proc/self/fd/{args[0]}")] if name == "fsync" else args
            done.append(" ".join([name, *(str(Path(path).relative_to(tmp_path)) for path in paths)]))
            return function(*args)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    write_checkpoint(tmp_path, 10)
    assert done == [
        "fsync step_00000010.saving/tp0_dp0.safetensors",
        "fsync step_00000010.saving/tp1_dp0.safetensors",
        "fsync step_00000010.saving/manifest.json",
        "fsync step_00000010.saving",
        "rename step_00000010.saving step_00000010",
        "fsync .",
        "fsync latest.saving",
        "replace latest.saving latest",
        "fsync .",
    ]


# --- damage --------------------------------------------------------------------------------------------------------


def all_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_a_flipped_bit_in_any_file_is_found_and_the_file_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20)
    assert all_files(path) == ["manifest.json", "tp0_dp0.safetensors", "tp1_dp0.safetensors"]
    for name in all_files(path):
        file = path / name
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(UserError, match=name):
                find_checkpoint(tmp_path, str(path))
        found, passed_over = find_checkpoint(tmp_path)
        assert found == tmp_path / "step_00000010"
        assert [passed[0] for passed in passed_over] == [path]
        assert name in passed_over[0][1]
        file.write_bytes(content)
    assert find_checkpoint(tmp_path) == (path, [])


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long"])
@pytest.mark.parametrize("name", ["manifest.json", "tp0_dp0.safetensors", "tp1_dp0.safetensors"])
def test_a_file_of_the_wrong_length_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = write_checkpoint(tmp_path, 10)
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes({"empty": b"", "short": content[:-1], "long": content + b"\n"}[damage])
    with pytest.raises(UserError, match=name) as error:
        find_checkpoint(tmp_path, str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"no checkpoint in .* is sound: .*{name}"):
        find_checkpoint(tmp_path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FORMAT", 2)
    path = write_checkpoint(tmp_path, 10)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"manifest\.json: has format 2, this version reads format 1"):
        find_checkpoint(tmp_path, str(path))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "absent") == (None, [])
    assert find_checkpoint(tmp_path) == (None, [])
    write_checkpoint(tmp_path, 10)
    assert find_checkpoint(tmp_path, "never") == (None, [])
    with pytest.raises(UserError, match=r"--resume .*step_7: no such checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path / "step_7"))


def test_ranks_that_share_the_verification_read_every_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, 10)
    read: list[tuple[int, str]] = []
    for parts in (1, 2, 3):
        for part in range(parts):
            digest = files._sha256

            def noted(file: Path, part: int = part, digest: Callable[[Path], str] = digest) -> str:
                read.append((part, file.name))
                return digest(file)

            with monkeypatch.context() as patched:
                patched.setattr(files, "_sha256", noted)
                files.verify(path, part, parts)
    # One reads both; then each rank its own.
    names = ["tp0_dp0.safetensors", "tp1_dp0.safetensors"]
    assert sorted(read[:2]) == [(0, name) for name in names]
    assert read[2:] == [(0, names[0]), (1, names[1])] * 2


def test_a_folder_without_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    files.require_space(tmp_path, free.f_bavail * free.f_frsize // 2)
    with pytest.raises(
        UserError, match=rf"{tmp_path} needs 1,000,000,000,000,000\.0 MB, but only [\d,]+\.\d MB are free"
    ):
        files.require_space(tmp_path, 10**21)


def test_tensor_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    """Read by the library; longer than one chunk, of every dtype, empty, and with a header of every length."""
    for count in range(9):
        tensors = {
            "x" * count + "big": torch.arange(3 << 20, dtype=torch.float32),
            "bytes": torch.arange(7, dtype=torch.uint8),
            "numbers": torch.tensor([[1, -(2**40)]]),
            "exact": torch.tensor(0.1, dtype=torch.float64),
            "none": torch.empty(0),
            "strided": torch.arange(6.0).view(2, 3).t(),
        }
        entry = files.write_tensors(tmp_path / "file", tensors)
        content = (tmp_path / "file").read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        loaded = load_file(tmp_path / "file")
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"absent/tp0_dp0\.safetensors"):
        files.write_tensors(tmp_path / "absent" / "tp0_dp0.safetensors", {"x": torch.zeros(1)})


# --- retention -----------------------------------------------------------------------------------------------------


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["latest", "step_00000030", "step_00000040"]
    assert (tmp_path / "latest").read_text() == "step_00000040\n"
    write_checkpoint(tmp_path, 50, keep=1)
    assert names_in(tmp_path) == ["latest", "step_00000050"]


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        write_checkpoint(tmp_path, step, keep=2, keep_every=20)
    kept = [f"step_{step:08d}" for step in (20, 40, 60, 70)]
    assert names_in(tmp_path) == ["latest", *kept]
    write_checkpoint(tmp_path, 90, keep=1, keep_every=20)
    assert names_in(tmp_path) == ["latest", *kept[:3], "step_00000090"]


@pytest.mark.parametrize("damage", ["manifest.json", "tp1_dp0.safetensors"])
def test_what_lost_a_file_does_not_count_among_those_that_stay(tmp_path: Path, damage: str) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, keep=9)
    for step in (20, 30):
        (tmp_path / f"step_{step:08d}" / damage).unlink()
    write_checkpoint(tmp_path, 40, keep=2)
    assert "step_00000010" in names_in(tmp_path)
    (tmp_path / "step_00000040" / damage).unlink()
    assert find_checkpoint(tmp_path).path == tmp_path / "step_00000010"
    for step in (50, 60):
        write_checkpoint(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["latest", "step_00000050", "step_00000060"]


@pytest.mark.parametrize("damage", ["manifest.json", "tp1_dp0.safetensors"])
def test_no_older_one_is_deleted_for_a_new_one_that_did_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """A file system that loses what it has promised: the rename of the new folder takes a file away."""
    write_checkpoint(tmp_path, 10)
    rename = os.rename

    def lossy(source: Path, target: Path) -> None:
        rename(source, target)
        if Path(target).name == "step_00000020":
            (Path(target) / damage).unlink()

    monkeypatch.setattr(os, "rename", lossy)
    write_checkpoint(tmp_path, 20, keep=1)
    assert "no older one is deleted" in caplog.text
    assert find_checkpoint(tmp_path).path == tmp_path / "step_00000010"


def test_newest_is_what_was_saved_last_after_a_return_to_an_earlier_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, keep=9)
    path = write_checkpoint(tmp_path, 15, keep=3)
    assert names_in(tmp_path) == ["latest", "step_00000015", "step_00000020", "step_00000030"]
    assert find_checkpoint(tmp_path).path == path


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, "first", keep=1)
    path = write_checkpoint(tmp_path, 10, "second", keep=1)
    assert names_in(tmp_path) == ["latest", "step_00000010"]
    assert CheckpointReader(path).state["note"] == "second"


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, 10)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "_delete", refuse)
    write_checkpoint(tmp_path, 20, keep=1)
    assert "step_00000010" in caplog.text
    assert find_checkpoint(tmp_path).path == tmp_path / "step_00000020"


# --- reading -------------------------------------------------------------------------------------------------------


def test_the_reader_assembles_whole_tensors(tmp_path: Path) -> None:
    reader = CheckpointReader(write_checkpoint(tmp_path, 10, "hello"))
    sharded = torch.arange(10, 22.0).view(4, 3)
    assert reader.state == {"note": "hello", "1": [0.1, None]}
    assert reader.names() == ["sharded", "whole"]
    assert reader.shape("sharded") == (4, 3)
    assert torch.equal(reader.full("sharded"), sharded)
    assert torch.equal(reader.full("sharded", "exp_avg"), sharded / 2)
    assert torch.equal(reader.full("whole"), torch.full((5,), 10.0))
    assert torch.equal(reader.full("whole", "exp_avg"), torch.zeros(5))
    assert reader.rank_state(1, 0)["rng"].tolist() == [1]
    assert reader.rank_state(0, 1) == {}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_reader_cuts_for_any_number_of_ranks(tmp_path: Path, tp_size: int) -> None:
    reader = CheckpointReader(write_checkpoint(tmp_path, 0))
    whole = torch.arange(12.0)
    size = 12 // tp_size
    for rank in range(tp_size):
        part = reader.local("sharded", "fp32", 1, size - 1, 0, rank, tp_size)
        assert torch.equal(part, whole[rank * size + 1 : (rank + 1) * size])
    assert torch.equal(reader.local("whole", "fp32", 2, 3, None, tp_size - 1, tp_size), torch.zeros(3))


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_any_slice_of_any_cut_reads_only_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int | None, saved: int
) -> None:
    """Every range of every rank's shard, against slices of the whole tensor; what is read is counted."""
    whole = torch.arange(8.0 * 12).view(8, 12)
    path = write_whole(tmp_path, whole, dim, saved)
    reader = CheckpointReader(path)
    read = [0]
    elements = CheckpointReader._elements

    def counted(self: CheckpointReader, name: str, kind: str, tp_rank: int, start: int, count: int) -> torch.Tensor:
        read[0] += count
        return elements(self, name, kind, tp_rank, start, count)

    monkeypatch.setattr(CheckpointReader, "_elements", counted)
    for parts in (1, 2, 4):
        for rank in range(parts):
            shard = whole if dim is None else whole.chunk(parts, dim)[rank]
            flat, row = shard.flatten(), shard[0].numel() if dim == 1 else shard.numel()
            for start in range(0, flat.numel(), 5):
                for count in {1, 7, row, flat.numel() - start} & set(range(1, flat.numel() - start + 1)):
                    read[0] = 0
                    part = reader.local("weight", "fp32", start, count, dim, rank, parts)
                    assert torch.equal(part, flat[start : start + count]), (parts, rank, start, count)
                    exact = dim != 1 or parts == saved or (start % row) + count <= row
                    # Whole rows of the shards that were saved, where only some of their columns are wanted.
                    assert read[0] == count if exact else read[0] <= (count + 2 * row) * max(1, parts // saved)


def write_whole(folder: Path, whole: torch.Tensor, dim: int | None, tp_size: int) -> Path:
    """A checkpoint of one parameter, cut over `tp_size` ranks along `dim`; None: the last rank writes it whole."""
    saving = files.begin(folder, 1)
    shards = [whole] * tp_size if dim is None else list(whole.chunk(tp_size, dim))
    entries = {}
    for tp_rank, shard in enumerate(shards):
        if dim is None and tp_rank < tp_size - 1:
            continue
        name = f"tp{tp_rank}_dp0.safetensors"
        tensors = {piece_key("weight", "fp32", 0): shard.flatten()}
        entries[name] = {**files.write_tensors(saving / name, tensors), "tp_rank": tp_rank, "dp_rank": 0}
    parameter = {"index": 0, "shape": list(whole.shape), "tp_dim": dim, "trained": True, "adam_step": None}
    manifest = {
        "step": 1,
        "layout": {"tp_size": tp_size, "dp_size": 1, "zero_stage": 1},
        "parameters": {"weight": parameter},
        "engine": {},
        "state": {},
        "files": entries,
    }
    return files.commit(saving, manifest, 1)


def test_a_missing_piece_is_an_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    manifest = files.read_manifest(path)
    manifest["parameters"]["whole"]["shape"] = [6]
    (path / "manifest.json").write_text(files._encode(manifest))
    with pytest.raises(UserError, match=r"holds 5 of 6 elements of whole \(fp32\)"):
        CheckpointReader(path).full("whole")


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["sequence"] == 1
    assert manifest["parameters"]["sharded"]["tp_dim"] == 0
