"""The learning rate as a pure function of the tokens already seen: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from fastslow_scale.config import Config


def learning_rate(config: Config, step: int) -> float:
    """The rate of optimizer step number `step` (from 0).

    Linear warm-up over w tokens: lr * (t + b) / w, where b is one step's tokens, so that the first step already moves.
    Then, with u in [0, 1] the share of the remaining tokens already seen and r = min_lr_ratio:
        cosine    lr * (r + (1 - r) * (1 + cos(pi u)) / 2)                              (arXiv 1608.03983)
        wsd       lr until u = 1 - d, then linearly down to r * lr, d = decay_fraction  (arXiv 2404.06395)
        constant  lr
    """
    schedule, per_step = config.schedule, config.train.tokens_per_step
    tokens, total = step * per_step, config.train.num_steps * per_step
    warmup = schedule.warmup_tokens if schedule.warmup_tokens is not None else (schedule.warmup_steps or 0) * per_step
    lr, floor = config.optimizer.lr, schedule.min_lr_ratio
    if tokens < warmup:
        return lr * min(1.0, (tokens + per_step) / warmup)
    seen = min(1.0, (tokens - warmup) / max(1, total - warmup))
    if schedule.kind == "cosine":
        return lr * (floor + (1 - floor) * (1 + math.cos(math.pi * seen)) / 2)
    if schedule.kind == "wsd" and schedule.decay_fraction > 0:
        left = min(1.0, (1 - seen) / schedule.decay_fraction)
        return lr * (floor + (1 - floor) * left)
    return lr
