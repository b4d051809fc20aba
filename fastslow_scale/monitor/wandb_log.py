"""A run's curves for Weights & Biases, if a config names a project. The package is the extra `wandb`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.extras import refuse_missing, require
from fastslow_scale.monitor.logs import curves

FILE_NAME = "wandb.json"
FINISH_SECONDS = 60.0


def refuse_missing_wandb(config: Config) -> None:
    """Raise `UserError` where a project is named and the package is missing."""
    if config.monitor.wandb_project is not None:
        refuse_missing("wandb", "wandb", _key(config))


class WandbLog:
    """Sends each record as a row of its own, with `step` as the axis of all curves.

    RUN/wandb.json keeps the id of the run at W&B and how far it was sent. What is missing there is sent at the next
    start. Rows cannot be taken back, so steps that run again after a resume keep the values of the first attempt.

    A failure of W&B never ends a run: one line says that it gets nothing until the next start. Only what the user can
    mend, such as a missing login, ends it before it begins.
    """

    def __init__(
        self, run_dir: Path, config: Config, so_far: Iterable[Mapping[str, Any]], warn: Callable[[str], None]
    ) -> None:
        """so_far: the records of metrics.jsonl.

        Raises:
            UserError: the package is missing, wandb.json is damaged, or W&B refuses the project or the user.
        """
        wandb = require("wandb", "wandb", _key(config))
        so_far = list(so_far)
        self._warn, self._has_failed = warn, False
        self._path = run_dir / FILE_NAME
        self._project = config.monitor.wandb_project
        self._id, self._sent = uuid.uuid4().hex[:8], (-1, False)
        if so_far:
            self._take_up_earlier()
        self._run: Any = None
        try:
            self._run = wandb.init(
                project=self._project,
                id=self._id,
                resume="allow",
                name=run_dir.resolve().name,
                dir=str(run_dir),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True, console="off", save_code=False, finish_timeout=FINISH_SECONDS),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(f"{_key(config)}: {' '.join(str(error).split())}") from None
        except (wandb.errors.Error, TimeoutError) as error:
            self._give_up(error)
        for record in so_far:
            if "event" not in record:
                self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        place = (record["step"], "validation_loss" in record)
        if self._has_failed or place <= self._sent:
            return
        try:
            self._run.log({"step": record["step"], **dict(curves(record))})
        except Exception as error:  # whatever goes wrong at W&B, the training is worth more
            self._give_up(error)
            return
        self._sent = place
        self._keep()

    def close(self, failed: bool) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:  # as above
            self._warn(f"warning: Weights & Biases did not take the end of this run: {error!r}")

    def _give_up(self, error: Exception) -> None:
        self._has_failed = True
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._warn(f"warning: Weights & Biases gets nothing of this run until its next start: {reason}")

    def _take_up_earlier(self) -> None:
        """The run of an earlier start in this folder, unless that was in another project."""
        if not self._path.exists():
            return
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            earlier = kept["project"], str(kept["id"]), (int(kept["step"]), bool(kept["validated"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self._path} is damaged; without it the run begins anew at Weights & Biases") from None
        if earlier[0] == self._project:
            self._id, self._sent = earlier[1:]

    def _keep(self) -> None:
        step, validated = self._sent
        content = {"project": self._project, "id": self._id, "step": step, "validated": validated}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def _key(config: Config) -> str:
    return f"monitor.wandb_project = {config.monitor.wandb_project}"
