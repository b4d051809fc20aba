"""Checkpoints on disk: kills at every moment, damage of every kind, retention, and reading without an engine."""

from __future__ import annotations

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
from safetensors.torch import save

from data_pipeline.errors import UserError
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train.checkpoint_files import find_checkpoint
from fastslow_scale.train.checkpoint_reader import CheckpointReader, piece_key, rank_state_key

pytestmark = pytest.mark.unit

FILE_OPERATIONS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


def write_checkpoint(folder: Path, step: int, note: str = "", keep: int = 2) -> Path:
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
    return files.commit(saving, manifest, keep)


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

    def half_a_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        content = save(tensors)
        path.write_bytes(content[: len(content) // 2])

    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name), lambda *args: None))
    files.save_file = counted(files.save_file, half_a_file)


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
