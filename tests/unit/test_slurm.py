"""The parts of a job on a cluster that need no cluster: SLURM's words, the watch, the wrapper of a task."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from fastslow_scale.launch.slurm import JobState, NoAnswer, gpus_of, job_state, minutes_of, refuse_without_slurm
from fastslow_scale.launch.submit import Plan, Request
from fastslow_scale.launch.watch import Watch
from tests.commands import REPOSITORY
from tests.configs import small_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0),gpu:a30:2(S:1),nvme:1", 6),
        ("nvme:3", 0),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:01", 91),
        ("1:30:00", 90),
        ("1:30:01", 91),
        ("2-0", 2880),
        ("1-12", 2160),
        ("1-00:30", 1470),
        ("1-00:00:30", 1441),
        ("7-00:00:00", 10080),
        ("infinite", None),
    ],
)
def test_times_in_slurms_words(text: str, minutes: int | None) -> None:
    assert minutes_of(text) == minutes


def test_a_job_queued_later_leaves_an_earlier_ones_config_alone(tmp_path: Path) -> None:
    first, again, other = (
        Plan(Request("x.yaml"), small_config(train={"run_dir": tmp_path}, optimizer={"lr": lr}), 1).snapshot
        for lr in (1e-3, 1e-3, 3e-4)
    )
    assert first == again
    assert first != other
    assert first.parent == other.parent == tmp_path / "slurm"


def test_another_time_is_refused() -> None:
    with pytest.raises(UserError, match="--time tomorrow"):
        minutes_of("tomorrow")


def test_without_slurm_there_is_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no SLURM on this machine.*--cluster local"):
        refuse_without_slurm()
    with pytest.raises(NoAnswer):
        job_state("7")


def state(name: str, log: Path = Path("/nowhere"), restarts: int = 0) -> JobState:
    return JobState(name, "None", "n[1-2]", restarts, "1:0", log)


def watched(answers: list[JobState | Exception | None], run: Path, patience: float = 60) -> tuple[int, str]:
    """Status and output of a watch that gets these answers, the last of them for ever."""
    left = list(answers)

    def ask(job: str) -> JobState | None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    out = io.StringIO()
    code = Watch("7", run, 10, out, ask, poll_seconds=0.001, patience_seconds=patience).follow()
    return code, out.getvalue()


def measured(run: Path, step: int) -> None:
    line = {"step": step, "loss": 2.5, "tokens_per_second": 1234.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_a_watch_tells_each_state_and_step_once(tmp_path: Path) -> None:
    measured(tmp_path, 4)
    code, output = watched([state("PENDING"), *[state("RUNNING")] * 3, state("COMPLETED")], tmp_path)
    assert code == 0
    assert output.splitlines() == [
        "job 7: step 4/10  loss 2.5000  1,234 tokens/s",
        "job 7: PENDING on n[1-2]",
        "job 7: RUNNING on n[1-2]",
        "job 7: COMPLETED on n[1-2]",
    ]


def test_a_failure_shows_the_logs_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    code, output = watched([state("RUNNING", log), state("FAILED", log)], tmp_path)
    assert code == 1
    assert output.splitlines()[-22:] == [
        "job 7: ended as FAILED, exit status 1:0",
        f"job 7: the last lines of {log}:",
        *(f"line {number}" for number in range(80, 100)),
    ]


def test_a_job_that_is_queued_again_is_followed(tmp_path: Path) -> None:
    answers = [state("NODE_FAIL"), state("PENDING", restarts=1), state("RUNNING", restarts=1), state("COMPLETED")]
    code, output = watched(list(answers), tmp_path)
    assert code == 0
    assert "RUNNING on n[1-2], started again 1 times" in output


@pytest.mark.parametrize(("step", "code"), [(10, 0), (9, 1), (None, 1)])
def test_a_job_that_slurm_has_forgotten_ends_the_watch(step: int | None, code: int, tmp_path: Path) -> None:
    if step is not None:
        measured(tmp_path, step)
    assert watched([state("RUNNING"), None], tmp_path)[0] == code


def test_a_controller_that_is_silent_for_a_while(tmp_path: Path) -> None:
    gone = NoAnswer("Unable to contact slurm controller")
    assert watched([gone, gone, state("RUNNING"), gone, state("COMPLETED")], tmp_path)[0] == 0
    code, output = watched([state("RUNNING"), gone], tmp_path, patience=0.05)
    assert code == 1
    assert output.splitlines()[-1].endswith("Unable to contact slurm controller")


CHILD = """
import signal, sys, time
def stop(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    time.sleep(0.3)
    sys.exit(int(sys.argv[1]))
for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), stop)
print("ready", flush=True)
time.sleep(60)
"""


def only_wrapper(task: subprocess.Popen[str], number: int) -> None:
    task.send_signal(number)


def all_processes(task: subprocess.Popen[str], number: int) -> None:
    os.killpg(task.pid, number)


@pytest.mark.parametrize("send", [only_wrapper, all_processes])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_tasks_wrapper_hands_signals_on_and_marks_75(
    number: int, send: Callable[[subprocess.Popen[str], int], None], tmp_path: Path
) -> None:
    """To the wrapper alone, as with cgroups, or to every process of the task, as without."""
    mark = tmp_path / "mark"
    command = [str(REPOSITORY / "slurm" / "rank.sh"), str(mark), sys.executable, "-c", CHILD, "75"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as task:
        try:
            assert task.stdout is not None and task.stdout.readline() == "ready\n"
            send(task, number)
            output = task.stdout.read()
            assert task.wait(timeout=30) == 0
        finally:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
    assert f"heard {signal.Signals(number).name}" in output
    assert mark.exists()


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_a_tasks_wrapper_keeps_other_statuses(status: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = [REPOSITORY / "slurm" / "rank.sh", mark, "sh", "-c", f"exit {status}"]
    assert subprocess.run(command, timeout=30, check=False).returncode == status
    assert not mark.exists()
