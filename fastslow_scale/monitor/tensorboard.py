"""A run's curves for TensorBoard, in the groups people look for them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fastslow_scale.config import Config
from fastslow_scale.monitor.logs import curves
from fastslow_scale.versions import versions

LAYOUT = {
    "overview": {
        "loss": ["Multiline", ["loss/train", "loss/validation"]],
        "size of the gates": ["Multiline", ["coupling/gate_norm/.*"]],
        "contribution of the slow path": ["Multiline", ["coupling/contribution/.*"]],
        "tokens per second": ["Multiline", ["speed/tokens_per_second"]],
        "seconds of a step, by part": ["Multiline", ["speed/(data|forward|backward|communication|optimizer|other)_.*"]],
    }
}
"""The page of the CUSTOM SCALARS tab: what one looks at first."""


class TensorBoardLog:
    """Writes records as scalars; lists (one value an exchange) become one curve each, as in coupling/gate_norm/0.

    A run resumed at step N writes a further event file that tells TensorBoard to forget what earlier files hold beyond
    that step, so that each step has one value.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        self._start_step = start_step
        purge_step = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def describe(self, config: Config) -> None:
        """What stays the same over the run: config and versions as text, the layout, the row of the HPARAMS tab."""
        self._writer.add_text("config", textwrap.indent(config.to_yaml(), "    "), global_step=self._start_step)
        self._writer.add_text("versions", "\n".join(f"    {line}" for line in versions()), self._start_step)
        self._writer.add_custom_scalars(LAYOUT)
        for summary in hparams(hyperparameters(config), {"loss/validation": 0.0}):
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()

    def write_inside(self, step: int, values: Mapping[str, torch.Tensor], loss_by_position: torch.Tensor) -> None:
        """Histograms, and the loss at each position [T] as an image."""
        for name, value in values.items():
            self._writer.add_histogram(f"coupling/{name}", value, step)
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(loss_by_position.numpy(), linewidth=0.8)
        axes.set_xlabel("position in the sequence")
        axes.set_ylabel("loss, nats")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self._writer.add_image("loss/by_position", np.asarray(canvas.buffer_rgba())[..., :3], step, dataformats="HWC")
        self._writer.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        for tag, value in curves(record):
            self._writer.add_scalar(tag, value, record["step"])
        # What a killed run leaves unflushed before its last checkpoint would be missing for ever: those steps do not
        # run again.
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def hyperparameters(config: Config) -> dict[str, str | int | float]:
    """What distinguishes one run of a study from another."""
    return {
        "variant": config.model.variant,
        "seed": config.train.seed,
        "lr": config.optimizer.lr,
        "hidden_size": config.model.hidden_size,
        "num_hidden_layers": config.model.num_hidden_layers,
        "pool_size": config.slow.pool_size,
        "slow_initializer_range": str(config.slow.initializer_range),
        "gate_lr_multiplier": config.slow.gate_lr_multiplier,
        "global_batch_size": config.train.global_batch_size,
        "seq_length": config.train.seq_length,
    }
