"""`fastslow ablate` from its options to its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from data_pipeline.errors import UserError
from fastslow_scale.config_file import load_config
from fastslow_scale.study.ablation import ablate
from fastslow_scale.study.ablation_report import print_ablation, write_report
from fastslow_scale.study.arms import choose_arms, size_of
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
    """Check the options against each other and the config. Raises `UserError`."""
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
    return Study(
        config_path=config_path,
        overrides=tuple(given),
        arms=tuple(arms),
        baseline=baseline or names[0],
        seeds=seeds,
        margin=load_config(config_path, given).study.margin_nats,
        output=output,
        orders=orders,
        sweep=_rates(lr_sweep),
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--lr-sweep must be numbers with commas between them (got {text!r})") from None
    if any(not rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise UserError(f"--lr-sweep must be different learning rates above 0 (got {text!r})")
    return rates


def run_study(study: Study, jobs: int | None, nproc: int | None, console: Console, command: str) -> bool:
    """Do the runs, print and write the report; False if a signal stopped it.

    Raises:
        UserError: layout, data or output do not fit; nothing has been started then.
        RunError: a run failed.
    """
    config = load_config(study.config_path, study.overrides)
    ranks = nproc or config.parallel.tensor_parallel_size
    config.data_parallel_size(ranks)
    open_data(config)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for arm in study.arms:
        size = size_of(load_config(study.config_path, [*study.overrides, *arm.overrides]))
        line = f"{arm.name:24} {size.parameters:>13,} parameters  {size.flops_per_token:.4g} FLOPs a token"
        console.print(line, markup=False, highlight=False)
    found = ablate(study, jobs or max(1, cores // ranks), ranks, console)
    if found is None:
        return False
    print_ablation(found, console)
    for path in write_report(found, study.output, command):
        print(path)
    return True
