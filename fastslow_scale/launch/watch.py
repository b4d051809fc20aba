"""Follows a job of SLURM until it ends: its states, its last measured step, and why it failed.

Asks `scontrol`, so it works without accounting, and every question has a time limit: a job that was killed before it
wrote anything, or that SLURM has forgotten, ends the watch as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from data_pipeline.errors import UserError
from fastslow_scale.launch.slurm import JobState, NoAnswer, job_state
from fastslow_scale.monitor.metrics import FILE_NAME, Record, read_metrics

POLL_SECONDS = 3.0
PATIENCE_SECONDS = 300.0
LOG_LINES = 20


class Watch:
    """One job and the run that it trains."""

    def __init__(
        self,
        job: str,
        run_dir: Path,
        total_steps: int,
        out: TextIO = sys.stdout,
        ask: Callable[[str], JobState | None] = job_state,
        poll_seconds: float = POLL_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ):
        """patience_seconds: how long SLURM may be silent before the watch gives up."""
        self.job, self.run_dir, self.total_steps = job, run_dir, total_steps
        self._out, self._ask, self._poll, self._patience = out, ask, poll_seconds, patience_seconds
        self._log: Path | None = None
        self._shown: object = None
        self._shown_step = 0
        self._size = -1

    def follow(self) -> int:
        """0: the job ended well; 1: it did not, or SLURM no longer knows it and the run is not finished."""
        ended_before, last_answer = "", time.monotonic()
        while True:
            try:
                now = self._ask(self.job)
                last_answer = time.monotonic()
            except NoAnswer as error:
                if time.monotonic() - last_answer > self._patience:
                    self._say(f"SLURM has not answered for {self._patience:.0f} s: {error}")
                    return 1
                time.sleep(self._poll)
                continue
            self._show_progress()
            if now is None:
                return self._forgotten()
            self._log = now.log
            self._show_state(now)
            if now.state == "COMPLETED":
                return 0
            # A job that is queued again passes through such a state: it counts when it stays.
            if now.is_over and now.state == ended_before:
                self._say(f"ended as {now.state}, exit status {now.exit_code}")
                self._show_log()
                return 1
            ended_before = now.state if now.is_over else ""
            time.sleep(self._poll)

    def _forgotten(self) -> int:
        if self._last_step() >= self.total_steps:
            self._say("no longer known to SLURM; the run is finished")
            return 0
        self._say("no longer known to SLURM, and the run is not finished")
        self._show_log()
        return 1

    def _show_state(self, now: JobState) -> None:
        shown = (now.state, now.reason, now.nodes, now.restarts)
        if shown != self._shown:
            self._shown = shown
            where = f" on {now.nodes}" if now.nodes and now.nodes != "(null)" else ""
            why = f" ({now.reason})" if now.reason != "None" else ""
            again = f", started again {now.restarts} times" if now.restarts else ""
            self._say(f"{now.state}{where}{why}{again}")

    def _show_progress(self) -> None:
        path = self.run_dir / FILE_NAME
        size = path.stat().st_size if path.exists() else 0
        if size == self._size:
            return
        self._size = size
        record = self._last_record()
        if record is not None and record["step"] != self._shown_step:
            self._shown_step = record["step"]
            self._say(
                f"step {record['step']}/{self.total_steps}  loss {record['loss']:.4f}  "
                f"{record['tokens_per_second']:,.0f} tokens/s"
            )

    def _last_step(self) -> int:
        record = self._last_record()
        return record["step"] if record else 0

    def _last_record(self) -> Record | None:
        try:
            records = read_metrics(self.run_dir / FILE_NAME)
        except UserError:
            return None
        return next((record for record in reversed(records) if "loss" in record), None)

    def _show_log(self) -> None:
        if self._log is None:
            return
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            self._say(f"it wrote no log ({self._log})")
            return
        self._say(f"the last lines of {self._log}:")
        print(*lines[-LOG_LINES:], sep="\n", file=self._out, flush=True)

    def _say(self, text: str) -> None:
        print(f"job {self.job}: {text}", file=self._out, flush=True)
