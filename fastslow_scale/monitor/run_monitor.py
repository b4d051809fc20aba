"""The one object a training loop reports to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fastslow_scale.config import Config
from fastslow_scale.monitor.console import Console, summary_lines
from fastslow_scale.monitor.csv_log import FILE_NAME as CSV_NAME
from fastslow_scale.monitor.csv_log import CsvLog
from fastslow_scale.monitor.logs import Log
from fastslow_scale.monitor.metrics import FILE_NAME, MetricsLog, RunSummary, read_metrics
from fastslow_scale.monitor.tensorboard import TensorBoardLog
from fastslow_scale.monitor.wandb_log import WandbLog


class NullMonitor:
    """Takes every report and does nothing with it: what all ranks but the first have."""

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Take a logged step: the keys of metrics.jsonl, plain numbers and lists."""

    def log_validation(self, step: int, loss: float) -> None:
        """Take the validation loss after a step (0: before the first)."""

    def lacks_validation(self, step: int) -> bool:
        """Whether no validation after this step is on record yet."""
        return True

    def log_event(self, record: Mapping[str, Any]) -> None:
        """Take a step that was out of the ordinary: `event`, `reason` and what there is to find out why."""

    def log_inside(self, step: int, values: Mapping[str, torch.Tensor], loss_by_position: torch.Tensor) -> None:
        """Take what is shown as histograms, and the loss at each position of the sequence, [T] in nats."""

    def message(self, text: str) -> None:
        """Show one line to whoever watches."""

    def summary(self) -> None:
        """Show how the run went, from all it has recorded."""

    def close(self) -> None:
        """Everything reported is on disk; the terminal is as before."""

    def __enter__(self) -> NullMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Monitor(NullMonitor):
    """Writes RUN/metrics.jsonl and what the config asks for, and shows progress.

    start_step: of the checkpoint resumed from, else 0.

    Raises:
        UserError: Weights & Biases is asked for and cannot be had.
    """

    def __init__(self, run_dir: Path, config: Config, start_step: int, total_steps: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._console = Console(start_step, total_steps)
        self._metrics = MetricsLog(run_dir / FILE_NAME, start_step)
        so_far = read_metrics(run_dir / FILE_NAME)
        self._logs: list[Log] = []
        self._tensorboard: TensorBoardLog | None = None
        if config.monitor.tensorboard:
            self._tensorboard = TensorBoardLog(run_dir / "tb", start_step)
            self._tensorboard.describe(config)
            self._logs.append(self._tensorboard)
        if config.monitor.csv:
            self._logs.append(CsvLog(run_dir / CSV_NAME, so_far))
        if config.monitor.wandb_project is not None:
            self._logs.append(WandbLog(run_dir, config, so_far, self.message))

    def log_step(self, record: Mapping[str, Any]) -> None:
        self._metrics.write(record)
        for log in self._logs:
            log.write(record)
        self._console.log_step(record)

    def log_validation(self, step: int, loss: float) -> None:
        if self._metrics.write_validation(step, loss):
            for log in self._logs:
                log.write({"step": step, "validation_loss": loss})
        self._console.log_validation(step, loss)

    def log_inside(self, step: int, values: Mapping[str, torch.Tensor], loss_by_position: torch.Tensor) -> None:
        if self._tensorboard:
            self._tensorboard.write_inside(step, values, loss_by_position)

    def lacks_validation(self, step: int) -> bool:
        return not self._metrics.has_validation(step)

    def log_event(self, record: Mapping[str, Any]) -> None:
        self._metrics.write(record)
        outcome = "; no weight was changed" if record["event"] == "skipped" else ""
        self._console.message(f"step {record['step']}: {record['reason']}{outcome}")

    def message(self, text: str) -> None:
        self._console.message(text)

    def summary(self) -> None:
        for line in summary_lines(self._run_dir, RunSummary.read(self._run_dir)):
            self._console.message(line)

    def close(self) -> None:
        self._close(failed=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        self._console.close()
        for log in self._logs:
            log.close(failed)
        self._metrics.close()
