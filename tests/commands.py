"""Runs the project's commands as a user does: another process, its output, its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fastslow_scale.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}


def fastslow(*arguments: object, status: int = 0, timeout: float = 180) -> str:
    """Run `fastslow ...` to its end, assert its exit status, return what it printed."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment(), check=False
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def refused(*arguments: object) -> str:
    """Run a command that must be refused: exit status 2 and one line, which is returned."""
    output = fastslow(*arguments, status=2).strip()
    assert len(output.splitlines()) == 1, output
    assert output.startswith("error: "), output
    return output


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`fastslow ...` in a process group of its own, whose every process is gone at the end."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_group(process)
        process.communicate()


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the process and the children it started."""
    os.killpg(process.pid, signal.SIGKILL)
