"""Watches each step's loss and gradient norm: what must not reach the weights, and when a run is past saving."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from data_pipeline.errors import UserError
from fastslow_scale.config import TrainConfig


class Verdict(NamedTuple):
    """What was wrong with a step, in words, and whether it was kept from the weights."""

    reason: str
    skipped: bool


class Guard:
    """A running window of the last losses, the same on every rank.

    A loss is a spike if it lies more than `train.spike_sigma` standard deviations above the mean of the window, once
    `train.spike_window` losses are in it. Losses of steps that were not applied do not enter. After
    `train.max_bad_steps` steps in a row that were not applied the run stops.
    """

    def __init__(self, config: TrainConfig):
        self._config = config
        self._window: deque[float] = deque(maxlen=config.spike_window)
        self._in_a_row = 0
        self.skipped_steps = 0

    @property
    def limit(self) -> float:
        """The largest loss that is no spike."""
        if not self._config.spike_sigma or len(self._window) < self._config.spike_window:
            return math.inf
        mean = statistics.fmean(self._window)
        return mean + self._config.spike_sigma * statistics.stdev(self._window, mean)

    @property
    def skip_above(self) -> float:
        """The largest loss of a step that may change weights."""
        return self.limit if self._config.skip_spikes else math.inf

    def judge(self, loss: float, grad_norm: float, applied: bool) -> Verdict | None:
        """Take in a step that has just been made; None if nothing was wrong with it."""
        limit = self.limit
        if not math.isfinite(loss):
            reason = f"the loss is not finite ({loss})"
        elif loss > limit:
            reason = f"the loss {loss:.4g} is a spike (above {limit:.4g})"
        elif not applied:
            reason = f"the gradient norm is not finite ({grad_norm})"
        else:
            reason = ""
        if applied:
            self._in_a_row = 0
            self._window.append(loss)
        else:
            self._in_a_row += 1
            self.skipped_steps += 1
        return Verdict(reason, skipped=not applied) if reason else None

    def stop_if_lost(self, step: int) -> None:
        """Raises UserError after too many steps in a row that were not applied."""
        if self._in_a_row >= self._config.max_bad_steps:
            raise UserError(
                f"{self._in_a_row} steps in a row were not applied, the last was step {step} (train.max_bad_steps): "
                "look at the events in metrics.jsonl for what they measured and which samples they had; "
                "a lower optimizer.lr or an older checkpoint (--resume) may help"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; floats survive JSON bit for bit."""
        return {"window": list(self._window), "in_a_row": self._in_a_row, "skipped_steps": self.skipped_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window.extend(state["window"])
        self._in_a_row, self.skipped_steps = state["in_a_row"], state["skipped_steps"]
