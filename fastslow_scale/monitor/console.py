"""What a person watching a run sees: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from data_pipeline.errors import UserError
from fastslow_scale.monitor.metrics import RunSummary

WIDTH = 100
BAR_WIDTH = 15


class Console:
    """Shows logged steps, validations and messages; `close` leaves the terminal as it was."""

    def __init__(self, start_step: int, total_steps: int, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console()
        self._total_steps = total_steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=BAR_WIDTH),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="")
            self._bar.start()

    def log_step(self, record: Mapping[str, Any]) -> None:
        digits = len(str(self._total_steps))
        done = f"{record['step']:>{digits}}/{self._total_steps}  "
        if self._bar:
            room = self._console.width - BAR_WIDTH - len(done)
            status = _status(record, self._total_steps, room)
            self._bar.update(self._task, completed=record["step"], status=status, refresh=True)
        else:
            line = f"step {done}"
            self._line(line + _status(record, self._total_steps, WIDTH - len(line)))

    def log_validation(self, step: int, loss: float) -> None:
        self.message(f"validation after step {step}: loss {loss:.4f}")

    def message(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        # Lines reach a file or a pipe as they are written: a run is watched with tail -f.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def print_summary(run_dir: Path | str) -> None:
    """Print how a run went, from its folder; also for a run that finished long ago."""
    print("\n".join(summary_lines(run_dir, RunSummary.read(run_dir))), flush=True)


def summary_lines(run_dir: Path | str, summary: RunSummary) -> list[str]:
    lines = [
        f"steps            {summary.steps:,}",
        f"tokens           {summary.tokens:,} in {_duration(summary.training_seconds)}"
        f" ({summary.tokens_per_second:,.0f} tokens/s)",
    ]
    first, last = summary.first_validation, summary.last_validation
    if first and last:
        before, after = first["validation_loss"], last["validation_loss"]
        lines.append(
            f"validation loss  {before:.4f} at step {first['step']}, {after:.4f} at step {last['step']}"
            f" ({after - before:+.4f})"
        )
    best = summary.best_validation
    if best and last and best["step"] != last["step"]:
        lines.append(f"best validation  {best['validation_loss']:.4f} at step {best['step']}")
    for exchange, norm in enumerate(summary.gate_norms):
        text = f"gate             norm {norm:.4g} at exchange {exchange}"
        if exchange < len(summary.contributions):
            text += f", contribution {summary.contributions[exchange]:.4g}"
        lines.append(text)
    lines.append(f"run folder       {run_dir}")
    if (Path(run_dir) / "tb").is_dir():
        lines.append(f"curves           {tensorboard_command(run_dir)}")
    return lines


def tensorboard_command(run_dir: Path | str) -> str:
    """The command that shows this run's curves, as it works from the current folder."""
    program = Path(sys.executable).parent / "fastslow"
    relative = os.path.relpath(program)
    shown = "fastslow" if not program.exists() else str(program) if relative.startswith("..") else relative
    return f"{shlex.quote(shown)} tensorboard {shlex.quote(str(run_dir))}"


def tensorboard_arguments(runs: Sequence[Path], port: int) -> list[str]:
    """What TensorBoard is started with: one run or a folder of them as it is, several by their names.

    Raises:
        UserError: a folder that is not there, or holds no events.
    """
    for run in runs:
        if not run.is_dir():
            raise UserError(f"run {run} is not a folder" if run.exists() else f"run {run} does not exist")
        if next(run.rglob("events.out.tfevents.*"), None) is None:
            raise UserError(f"{run} holds nothing that TensorBoard could show")
    with socket.socket() as probe:
        try:
            probe.bind(("localhost", port))
        except OSError:
            raise UserError(f"--port {port} is in use: --port 0 takes a free one") from None
    if len(runs) == 1:
        where = ["--logdir", str(runs[0])]
    else:
        if any(set(str(run)) & set(",:") for run in runs):
            raise UserError("TensorBoard cannot tell run folders apart whose names hold a comma or a colon")
        where = ["--logdir_spec", ",".join(f"{run}:{run}" for run in runs)]
    return [*where, "--host", "localhost", "--port", str(port)]


def _status(record: Mapping[str, Any], total_steps: int, room: int) -> str:
    """One step in at most `room` columns: the parts a person misses least are left out first."""
    parts = {
        "loss": f"loss {record['loss']:.4f}",
        "lr": f"lr {record['lr']:.2e}",
        "norm": f"norm {record['grad_norm']:.3g}",
        "speed": f"{_short(record['tokens_per_second'])} tok/s",
        "left": f"left {_duration((total_steps - record['step']) * record['step_seconds'])}",
    }
    if record.get("gate_norm"):
        parts["gate"] = f"gate {max(record['gate_norm']):.3g}"
    for name in ("lr", "norm", "gate", "speed"):
        if len("  ".join(parts.values())) > room:
            parts.pop(name, None)
    return "  ".join(parts.values())[: max(0, room)]


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).replace(" days, ", "d ").replace(" day, ", "d ")
