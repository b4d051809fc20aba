"""Starts the runs of a study, several at a time, each as `fastslow train` of its own with its output in a log file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_pipeline.errors import UserError
from fastslow_scale.errors import RunError
from fastslow_scale.launch.local import available_cores
from fastslow_scale.launch.signals import EXIT_START_AGAIN, STOP_SIGNALS
from fastslow_scale.monitor.metrics import FILE_NAME, RunSummary
from fastslow_scale.study.runs import Run

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Going:
    """A run whose process has been started. Of those that go side by side each has a slot of its own."""

    run: Run
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float

    def steps(self) -> int:
        """Logged so far."""
        with contextlib.suppress(UserError):  # no file yet, or one just being cut back for a resume
            return RunSummary.read(self.run.folder).steps if (self.run.folder / FILE_NAME).exists() else 0
        return 0


def execute(runs: Sequence[Run], jobs: int, nproc: int, console: Console) -> bool:
    """Run all that are not finished, `jobs` side by side, each with `nproc` ranks, its share of cores, its own GPUs.

    Returns:
        False if this process was told to stop: the runs have then stopped at checkpoints.

    Raises:
        UserError: a folder holds another run.
        RunError: a run failed, or was stopped by itself; those beside it were finished, no further one was started.
    """
    waiting = [run for run in runs if not run.finished()]
    if len(waiting) < len(runs):
        _say(console, f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
    threads = max(1, available_cores() // (jobs * nproc))
    steps = {run.folder: run.config().train.num_steps for run in waiting}
    going: list[Going] = []
    failures: list[str] = []
    passed, begun = 0, time.monotonic()
    with _stop_signals_handed_on(going) as told, _progress(console) as bar:
        task = bar.add_task("", total=sum(steps.values()))
        while going or (waiting and not failures and not told):
            while waiting and len(going) < jobs and not failures and not told:
                slot = min(set(range(jobs)) - {each.slot for each in going})
                going.append(_start(waiting.pop(0), slot, nproc, threads))
            done = len(runs) - len(waiting) - len(going)
            names = ", ".join(f"{each.run.arm} {each.run.seed}" for each in going)
            bar.update(
                task, completed=passed + sum(each.steps() for each in going), description=f"{done}/{len(runs)} {names}"
            )
            time.sleep(LOOK_SECONDS)
            for each in [each for each in going if each.process.poll() is not None]:
                going.remove(each)
                each.log.close()
                if each.process.returncode == 0 and each.run.finished():
                    passed += steps[each.run.folder]
                    left = (time.monotonic() - begun) * (sum(steps.values()) - passed) / passed
                    _say(console, _line(each, len(runs) - len(waiting) - len(going), len(runs), left))
                elif each.process.returncode != EXIT_START_AGAIN or not told:
                    failures.append(_failure(each))
    if failures:
        raise RunError("; ".join(failures))
    return not told


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def _start(run: Run, slot: int, nproc: int, threads: int) -> Going:
    run.folder.mkdir(parents=True, exist_ok=True)
    log = (run.folder / "log").open("ab")
    # Through this module the run ends with this process, however that ends. In a session of its own it is sent a
    # terminal's Ctrl-C once, by `_stop_signals_handed_on`; twice would end it without a checkpoint.
    command = [sys.executable, "-m", "fastslow_scale.launch.rank", str(os.getpid()), "fastslow_scale.cli"]
    environment = {"OMP_NUM_THREADS": str(threads)}
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * nproc : (slot + 1) * nproc])
    process = subprocess.Popen(
        [*command, "train", run.config_path, *run.overrides, "--nproc", str(nproc)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=os.environ | environment,
        start_new_session=True,
    )
    return Going(run, slot, process, log, time.monotonic())


@contextlib.contextmanager
def _stop_signals_handed_on(going: Sequence[Going]) -> Iterator[list[int]]:
    """While it is entered, the runs are sent the stop signals of this process; yields the list of those so far."""
    told: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        told.append(number)
        for each in going:
            each.process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in STOP_SIGNALS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in going:  # only where this process itself failed
            each.process.terminate()
            each.process.wait()
            each.log.close()


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _line(ended: Going, done: int, total: int, left: float) -> str:
    last = RunSummary.read(ended.run.folder).last_validation
    assert last is not None, "a finished run"
    took, rest = (timedelta(seconds=round(seconds)) for seconds in (time.monotonic() - ended.started, left))
    return (
        f"{ended.run.folder}  validation loss {last['validation_loss']:.4f}  "
        f"({done} of {total} runs, {took}, about {rest} left)"
    )


def _failure(ended: Going) -> str:
    log = ended.run.folder / "log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"run {ended.run.folder} failed: {lines[-1].removeprefix('error: ') if lines else 'no output'} (see {log})"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()
