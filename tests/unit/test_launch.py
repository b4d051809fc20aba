"""The launcher: what ranks get, what a user sees when one fails, and that none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from fastslow_scale import cli
from fastslow_scale.launch.job import job_environment, joined_job, step_hosts
from fastslow_scale.launch.local import FIRST_INTERRUPT, launch, rank_environment
from fastslow_scale.launch.signals import EXIT_INTERRUPTED, EXIT_START_AGAIN, goes_on
from fastslow_scale.train import worker

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]

CHILD = """
import os, pathlib, signal, sys, time
from data_pipeline.errors import UserError

what, rank = sys.argv[1], int(os.environ["RANK"])
if what == "report":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")
    with open(f"{sys.argv[2]}/{rank}", "w") as file:
        print(*(os.environ.get(name) for name in names), sys.argv[3:], file=file)
elif what == "user_error":
    raise UserError("data.path must be a folder (got nowhere) in some.yaml")
elif what == "one_crashes":
    if rank == 1:
        raise RuntimeError("the first cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reason_of_rank_1 = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
    while not reason_of_rank_1.exists():
        time.sleep(0.01)
    raise RuntimeError("a peer is gone")
elif what == "one_is_killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
elif what == "exit":
    sys.exit(int(sys.argv[2]))
elif what == "wait":
    with open(f"{sys.argv[2]}/{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{sys.argv[2]}/{rank}.part", f"{sys.argv[2]}/{rank}")
    time.sleep(300)
elif what == "deaf":
    signal.signal(signal.SIGINT, lambda *_: open(f"{sys.argv[2]}/{rank}.heard", "w").close())
    with open(f"{sys.argv[2]}/{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{sys.argv[2]}/{rank}.part", f"{sys.argv[2]}/{rank}")
    while True:
        time.sleep(300)
elif what == "third_time":
    starts = f"{sys.argv[2]}/starts"
    if rank == 0:
        with open(starts, "a") as file:
            file.write("x")
        if open(starts).read() != "xxx":
            sys.exit(3)
"""


@pytest.fixture(autouse=True)
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `child` a module the ranks can run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{folder}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MALLOC_"))]:
        monkeypatch.delenv(name)


def test_ranks_get_their_place_their_arguments_and_a_fast_environment(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert launch(2, "child", ["report", str(tmp_path), "a b", "x=[1]"]) == 0
    for rank in (0, 1):
        line = (tmp_path / str(rank)).read_text().strip()
        assert line == f"{rank} {rank} 2 127.0.0.1 1 {16 * 2**30} ['a b', 'x=[1]']"
    assert dict(os.environ) == before


def test_one_rank_takes_the_same_way(tmp_path: Path) -> None:
    assert launch(1, "child", ["report", str(tmp_path)]) == 0
    assert (tmp_path / "0").read_text().startswith("0 0 1 127.0.0.1")


def test_threads_are_shared_out_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [rank_environment(n)["OMP_NUM_THREADS"] for n in (1, 2, 3, 16)] == ["8", "4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in rank_environment(2)


def test_a_user_error_is_one_line_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, "child", ["user_error"]) == 2
    captured = capfd.readouterr()
    assert captured.err == "error: data.path must be a folder (got nowhere) in some.yaml\n"
    assert captured.out == ""


def test_the_first_cause_is_shown_last_and_without_the_agents_noise(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, "child", ["one_crashes"]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("error: rank 1 failed:\nTraceback")
    assert shown.endswith("RuntimeError: the first cause\n")
    assert "runpy" not in shown and "elastic" not in shown and "a peer is gone" not in shown


def test_a_killed_rank_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert launch(2, "child", ["one_is_killed"]) == 1
    assert time.monotonic() - start < 60
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected", "shown"),
    [(2, 2, ""), (EXIT_START_AGAIN, 75, "the same command goes on"), (3, 1, "exit code 3")],
)
def test_exit_codes(code: int, expected: int, shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, "child", ["exit", str(code)]) == expected
    error = capfd.readouterr().err
    assert shown in error and bool(error) == bool(shown)


def test_how_to_go_on_depends_on_where_it_began(capfd: pytest.CaptureFixture[str]) -> None:
    """The same command with `--resume never` would begin again, and lose what was saved."""
    assert goes_on("auto") == "the same command goes on from here"
    for resume in ("never", "runs/base/checkpoints/step_00000010"):
        assert launch(1, "child", ["exit", str(EXIT_START_AGAIN)], goes_on=goes_on(resume)) == 75
        assert "; the same command with --resume auto goes on from here (exit" in capfd.readouterr().err


@pytest.mark.parametrize("resume", ["never", "runs/base"])
def test_restarts_by_torchrun_need_the_newest_checkpoint(resume: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_MAX_RESTARTS": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(worker, "run", lambda *_: pytest.fail("a rank began"))
    with pytest.raises(UserError, match=f"needs --resume auto .got {resume}"):
        cli.app(["train", "configs/tiny.yaml", "--resume", resume], standalone_mode=False)


def test_a_module_that_does_not_exist_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(1, "no_such_module") == 1
    assert "No module named no_such_module" in capfd.readouterr().err


def test_no_ranks_is_bad_input() -> None:
    with pytest.raises(UserError, match="at least 1"):
        launch(0, "child")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(number: signal.Signals, tmp_path: Path) -> None:
    program = "import sys; from fastslow_scale.launch.local import launch; sys.exit(launch(2, 'child', sys.argv[1:]))"
    with (tmp_path / "stderr").open("w") as stderr:
        launcher = subprocess.Popen([sys.executable, "-c", program, "wait", str(tmp_path)], stderr=stderr)
    try:
        pids = [int(_wait_for(tmp_path / str(rank)).read_text()) for rank in (0, 1)]
        launcher.send_signal(number)
        launcher.wait(timeout=60)
    finally:
        launcher.kill()
    if number != signal.SIGKILL:
        assert launcher.returncode == EXIT_START_AGAIN
        first = FIRST_INTERRUPT.decode() if number == signal.SIGINT else ""
        assert (tmp_path / "stderr").read_text() == (
            f"{first}stopped; the same command goes on from here (exit status 75)\n"
        )
    deadline = time.monotonic() + 60
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still running"
        time.sleep(0.05)


def test_a_second_interrupt_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    program = "import sys; from fastslow_scale.launch.local import launch; sys.exit(launch(2, 'child', sys.argv[1:]))"
    arguments = [sys.executable, "-c", program, "deaf", str(tmp_path)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stderr is not None
            pids = [int(_wait_for(tmp_path / str(rank)).read_text()) for rank in (0, 1)]
            launcher.send_signal(signal.SIGINT)
            _wait_for(tmp_path / "0.heard")
            _wait_for(tmp_path / "1.heard")
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(timeout=60) == EXIT_INTERRUPTED
            assert launcher.stderr.read() == FIRST_INTERRUPT.decode() + "ended by a second SIGINT\n"
        finally:
            launcher.kill()
    assert not any(_is_alive(pid) for pid in pids)


def test_failed_ranks_are_started_again_so_often(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, "child", ["third_time", str(tmp_path)], max_restarts=1) == 1
    assert launch(2, "child", ["third_time", str(tmp_path)], max_restarts=5) == 0
    assert (tmp_path / "starts").read_text() == "xxx"
    assert capfd.readouterr().err.count("starting all ranks again (1 of 1)") == 1


def test_a_users_mistake_is_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(1, "child", ["user_error"], max_restarts=3) == 2
    assert "again" not in capfd.readouterr().err


def test_a_process_alone_has_joined_nothing() -> None:
    assert not joined_job({})
    assert not joined_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"})


def test_torchrun_is_joined() -> None:
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "X": "",
    }
    assert joined_job(environment)
    assert job_environment(environment) == {key: value for key, value in environment.items() if key != "X"}


SRUN_RANK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


def test_srun_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[07-08]" ] && printf "node07\\nnode08\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert joined_job(SRUN_RANK)
    joined = job_environment(SRUN_RANK)
    port = int(joined.pop("MASTER_PORT"))
    assert joined == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node07"}
    assert 10000 <= port < 30000
    for other in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}):
        assert int(job_environment(SRUN_RANK | other)["MASTER_PORT"]) != port
    assert int(job_environment(SRUN_RANK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})["MASTER_PORT"]) == port


def test_an_address_that_is_set_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inside a container there is no scontrol; the script outside has found the address."""
    monkeypatch.setenv("PATH", str(tmp_path))
    joined = job_environment(SRUN_RANK | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345"})
    assert (joined["MASTER_ADDR"], joined["MASTER_PORT"], joined["RANK"]) == ("10.0.0.7", "12345", "5")


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_batch_scripts_and_interactive_shells_are_no_ranks(step: str | None) -> None:
    environment = {key: value for key, value in SRUN_RANK.items() if key != "SLURM_STEP_ID"}
    assert not joined_job(environment if step is None else environment | {"SLURM_STEP_ID": step})


def test_a_single_srun_task_may_start_its_own_ranks() -> None:
    assert not joined_job(SRUN_RANK | {"SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node[07-08]", ["node07", "node08"]),
        ("n1", ["n1"]),
        ("gpu[098-101,3],login,a-b[1-2]", ["gpu098", "gpu099", "gpu100", "gpu101", "gpu3", "login", "a-b1", "a-b2"]),
    ],
)
def test_node_lists_without_scontrol(
    nodes: str, hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert step_hosts(SRUN_RANK | {"SLURM_STEP_NODELIST": nodes}) == hosts


def test_a_node_list_that_nothing_can_expand_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"rack\[1-2\]node\[1-4\]"):
        job_environment(SRUN_RANK | {"SLURM_STEP_NODELIST": "rack[1-2]node[1-4]"})


def _wait_for(path: Path) -> Path:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
    return path


def _is_alive(pid: int) -> bool:
    """Running, that is: a zombie nobody has reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ablate", "configs/tiny.yaml", "--seeds", "0"], "'--seeds'"),
        (["generate", "run", "--prompt", "a", "--max-tokens", "x"], "'--max-tokens'"),
        (["eval"], "Missing"),
        (["nosuch"], "nosuch"),
        (["train", "configs/tiny.yaml", "--nosuch"], "--nosuch"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastslow", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line
