"""A file system that is full, then read-only, then large enough, under the real command."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastslow_scale.config_file import load_config
from fastslow_scale.model.model import count_parameters
from fastslow_scale.parallel.mesh import single_process_mesh
from tests.commands import fastslow, refused

pytestmark = pytest.mark.integration

# Large enough that checkpoints, not logs, fill the disk.
SIZES = ["model.hidden_size=128", "model.intermediate_size=256", "validation.every=0"]


@dataclass(frozen=True)
class Disk:
    """A folder with room for one checkpoint and a half; without the right to mount, one where no file may be whole."""

    folder: Path
    mounted: bool
    mend: Callable[[], None]


@pytest.fixture
def disk(config_file: Path, tmp_path: Path) -> Iterator[Disk]:
    checkpoint = 12 * count_parameters(load_config(config_file, SIZES), single_process_mesh())
    assert checkpoint > 10e6
    folder = tmp_path / "disk"
    folder.mkdir()
    size = int(1.5 * checkpoint + 3e6)
    if mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder):
        try:
            yield Disk(folder, True, lambda: remount(folder, f"rw,size={10 * size}"))
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (checkpoint // 2, hard))
    try:
        yield Disk(folder, False, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mount(*arguments: object) -> bool:
    try:
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def remount(folder: Path, options: str) -> None:
    assert mount("-o", f"remount,{options}", folder)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(config_file: Path, disk: Disk) -> None:
    run = disk.folder / "run"
    checkpoints = run / "checkpoints"
    arguments = ["train", config_file, *SIZES, f"train.run_dir={run}"]
    failed = fastslow(*arguments, status=2).splitlines()
    if disk.mounted:
        needs = rf"{checkpoints} needs [\d.]+ MB, but only [\d.]+ MB are free there"
        assert re.fullmatch(rf"error: the checkpoint of step 8 was not saved: rank 0: {needs}", failed[-1]), failed
        assert (checkpoints / "latest").read_text() == "step_00000004\n"
        assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000004"]
        remount(disk.folder, "ro")
        assert f"train.run_dir {run} cannot be written" in refused(*arguments)
    else:
        file = checkpoints / "step_00000004.saving" / "tp0_dp0.safetensors"
        cause = f"rank 0: {file}: File too large"
        assert failed[-1] == f"error: the checkpoint of step 4 was not saved: {cause}"
        assert list(checkpoints.iterdir()) == []
    disk.mend()
    lines = fastslow(*arguments).splitlines()
    if disk.mounted:
        assert f"resuming from {checkpoints / 'step_00000004'}" in lines
    assert (checkpoints / "latest").read_text() == "step_00000012\n"
    assert f"checkpoint {checkpoints / 'step_00000012'}" in lines
