"""A run folder belongs to one process at a time, and to nobody once that is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from fastslow_scale.train.run_lock import RunLock

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]

# Forks a child that stays, as a loader's workers do, then says that it holds the lock.
HOLDER = """
import os, sys, time
from pathlib import Path
from fastslow_scale.train.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_the_second_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            for _ in range(2):  # a refusal leaves the lock as it is
                with pytest.raises(UserError) as refusal:
                    RunLock(run).acquire()
                assert str(refusal.value) == (
                    f"train.run_dir {run} is in use: process {holder.pid} on {socket.gethostname()} trains into it"
                )
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # is alive, and holds every file that its parent had open
            lock = RunLock(run)
            assert lock.acquire() == []
            lock.close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_got_nothing_vanishes(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b" / "run"
    lock = RunLock(run)
    lock.acquire()
    assert run.is_dir()
    lock.close()
    lock.close()
    assert list(tmp_path.iterdir()) == []

    lock.acquire()
    (run / "config.yaml").touch()
    lock.close()
    assert (run / "config.yaml").exists()

    (tmp_path / "empty").mkdir()
    there_before = RunLock(tmp_path / "empty")
    there_before.acquire()
    there_before.close()
    assert (tmp_path / "empty").is_dir()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = RunLock(tmp_path)
    (line,) = lock.acquire()
    assert line.startswith(f"warning: {tmp_path} cannot be locked (Function not implemented): ")
    lock.close()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"train\.run_dir .*/file/run cannot be written: Not a directory"):
        RunLock(tmp_path / "file" / "run").acquire()
