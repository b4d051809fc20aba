"""A run's curves for TensorBoard, in the groups people look for them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "tokens": "data/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "gate_norm": "coupling/gate_norm",
    "contribution": "coupling/contribution",
}


class TensorBoardLog:
    """Writes records as scalars; lists (one value an exchange) become one curve each, as in coupling/gate_norm/0.

    A run resumed at step N writes a further event file that tells TensorBoard to forget what earlier files hold beyond
    that step, so that each step has one value.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        self._start_step = start_step
        purge_step = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def write_config(self, config_yaml: str) -> None:
        self._writer.add_text("config", textwrap.indent(config_yaml, "    "), global_step=self._start_step)
        self._writer.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        for key, value in record.items():
            if key == "step":
                continue
            tag = TAGS.get(key, key if "/" in key else f"other/{key}")
            if isinstance(value, list | tuple):
                for index, item in enumerate(value):
                    self._writer.add_scalar(f"{tag}/{index}", item, step)
            else:
                self._writer.add_scalar(tag, value, step)
        # What a killed run leaves unflushed before its last checkpoint would be missing for ever: those steps do not
        # run again.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
