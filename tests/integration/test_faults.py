"""What users of long runs meet: a signal, a killed rank, a rank that hangs. The same command then goes on."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fastslow_scale.launch.local import FIRST_INTERRUPT
from fastslow_scale.launch.signals import EXIT_INTERRUPTED, EXIT_START_AGAIN
from tests.commands import fastslow, refused, running
from tests.integration.test_train import exact, weights
from tests.soak import soak

pytestmark = pytest.mark.integration

FOUR_RANKS = ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true", "--nproc", "4"]
TWO_RANKS = ["parallel.tensor_parallel_size=2", "--nproc", "2"]


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """By rank: the launcher's only children, in the order of their start."""
    return sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)


def wait_for_step(launcher: subprocess.Popen[str], step: int) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("step") and int(line.split("/")[0].split()[1]) >= step:
            return
    raise AssertionError(f"the run ended before step {step}")


def wait_for_line(launcher: subprocess.Popen[str], wanted: str) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"the run ended without: {wanted}")


def rest_of(launcher: subprocess.Popen[str], status: int) -> list[str]:
    """What the run still prints, and that it ends with this status."""
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == status, output
    return output.splitlines()


@pytest.fixture(scope="module")
def uninterrupted(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "uninterrupted"
    fastslow("train", config_file, f"train.run_dir={run}", *TWO_RANKS)
    return run


def test_a_signal_to_one_rank_stops_all_at_a_checkpoint(config_file: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """SIGUSR1 to a rank, then SIGTERM to the launcher, each well before the next planned checkpoint."""
    run = tmp_path / "run"
    arguments = ["train", config_file, f"train.run_dir={run}", "checkpoint.every=100", *TWO_RANKS]
    for number, to_launcher, step in ((signal.SIGUSR1, False, 3), (signal.SIGTERM, True, 7)):
        with running(*arguments) as launcher:
            wait_for_step(launcher, step)
            (launcher if to_launcher else ranks_of(launcher)[1]).send_signal(number)
            lines = rest_of(launcher, EXIT_START_AGAIN)
        assert any(f"stopped by {number.name} after step" in line for line in lines), lines
        assert lines[-1] == "stopped; the same command goes on from here (exit status 75)"
    fastslow(*arguments)
    assert exact(run) == exact(uninterrupted)
    for key, tensor in weights(uninterrupted, 12).items():
        assert (weights(run, 12)[key] == tensor).all(), key


def test_a_second_job_in_the_same_folder_is_refused(config_file: Path, tmp_path: Path) -> None:
    """And leaves the first alone. That a killed one keeps nobody out, every test that goes on after a kill shows."""
    endless = ["train", config_file, f"train.run_dir={tmp_path / 'run'}", "train.max_steps=100000", *TWO_RANKS]
    with running(*endless) as launcher:
        wait_for_step(launcher, 1)
        first = ranks_of(launcher)[0].pid
        line = refused(*endless)
        assert line.endswith(f"/run is in use: process {first} on {socket.gethostname()} trains into it")
        wait_for_step(launcher, 5)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_started_again(
    config_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["train", config_file, f"train.run_dir={run}", *TWO_RANKS]
    with running(*arguments, "--max-restarts", "1") as launcher:
        wait_for_step(launcher, 6)
        ranks_of(launcher)[1].kill()
        lines = rest_of(launcher, 0)
    killed = lines.index("error: rank 1 was killed by SIGKILL (by hand, or for want of memory)")
    assert lines[killed + 1] == "starting all ranks again (1 of 1)"
    assert "resuming from" in lines[killed + 2]
    assert exact(run) == exact(uninterrupted)

    with running("train", config_file, f"train.run_dir={tmp_path / 'second'}", *FOUR_RANKS) as launcher:
        wait_for_step(launcher, 2)
        ranks_of(launcher)[3].kill()
        lines = rest_of(launcher, 1)
    assert lines[-1] == "error: rank 3 was killed by SIGKILL (by hand, or for want of memory)"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_host_and_step(config_file: Path, tmp_path: Path) -> None:
    arguments = ["train", config_file, f"train.run_dir={tmp_path / 'run'}", "train.timeout_seconds=10", *FOUR_RANKS]
    with running(*arguments, "train.max_steps=100000") as launcher:
        wait_for_step(launcher, 50)
        ranks_of(launcher)[2].suspend()
        lines = rest_of(launcher, 1)
    found = re.fullmatch(r"error: rank 2 on (\S+) does not answer: last seen \d+ s ago, after step (\d+)", lines[-1])
    assert found, lines[-1]
    assert found[1] == socket.gethostname()
    assert int(found[2]) > 0, "a sign of life each second, and fifty steps take several"
    assert any(re.match(r"warning: rank 2 on \S+ does not answer", line) for line in lines), "before any rank gives up"


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(config_file: Path, tmp_path: Path) -> None:
    """A rank that is suspended keeps the others from ever agreeing on a step."""
    run = tmp_path / "run"
    with running("train", config_file, f"train.run_dir={run}", "train.max_steps=100000", *TWO_RANKS) as launcher:
        wait_for_step(launcher, 3)
        ranks_of(launcher)[1].suspend()
        launcher.send_signal(signal.SIGINT)
        wait_for_line(launcher, FIRST_INTERRUPT.decode().strip())  # two signals at once may arrive as one
        launcher.send_signal(signal.SIGINT)
        lines = rest_of(launcher, EXIT_INTERRUPTED)
    assert lines[-1] == "ended by a second SIGINT"


@pytest.mark.slow
def test_nothing_is_lost_in_a_few_kills(tmp_path: Path) -> None:
    assert soak(cycles=2, seed=1, folder=tmp_path, console=Console())
