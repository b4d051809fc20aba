"""`fastslow ablate`'s options, checked before anything heavy is imported or written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.errors import UserError
from fastslow_scale.config_file import load_config
from fastslow_scale.monitor.wandb_log import refuse_missing_wandb
from fastslow_scale.study.arms import choose_arms
from fastslow_scale.study.runs import Study
from fastslow_scale.train.batch import open_data


def plan_study(
    config_path: str,
    overrides: Sequence[str],
    variants: str,
    own_arms: Sequence[str],
    seeds: int,
    tokens: int | None,
    output: Path,
    baseline: str | None,
    orders: int,
    lr_sweep: str,
) -> Study:
    """Check the options against each other, the config and its data. Raises `UserError`."""
    given = [*overrides, *((f"train.total_tokens={tokens}", "train.max_steps=null") if tokens else ())]
    for key in ("train.seed", "train.run_dir"):
        if any(override.startswith(f"{key}=") for override in overrides):
            raise UserError(f"{key} is the study's own to set: --seeds and --output decide it")
    arms = choose_arms(config_path, given, [name.strip() for name in variants.split(",") if name.strip()], own_arms)
    if not arms:
        raise UserError("--variants names no variant, and there is no --arm")
    names = [arm.name for arm in arms]
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline {baseline} is none of the arms {', '.join(names)}")
    config = load_config(config_path, given)
    refuse_missing_wandb(config)
    _, validation = open_data(config)
    if (rows := min(validation.num_samples, config.validation.max_sequences)) < 2:
        raise UserError(f"a study measures on at least 2 validation sequences (got {rows})")
    rates = _rates(lr_sweep)
    for arm in arms if rates else []:
        if any(override.startswith("optimizer.lr=") for override in arm.overrides):
            raise UserError(f"--arm {arm.name} has an optimizer.lr of its own, and --lr-sweep would choose another")
    study = Study(
        config_path=config_path,
        overrides=tuple(given),
        arms=tuple(arms),
        baseline=baseline or names[0],
        seeds=seeds,
        margin=config.study.margin_nats,
        output=output,
        orders=orders,
        sweep=rates,
    )
    for run in (*study.sweep_runs(), *study.runs(), *study.order_runs()):
        run.config()
    return study


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--lr-sweep must be numbers with commas between them (got {text!r})") from None
    if any(not 0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates) or (text and not rates):
        raise UserError(f"--lr-sweep must be different learning rates above 0 (got {text!r})")
    return rates
