"""From finished runs to what they say: `fastslow ablate`, without its printing."""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.console import Console

from data_pipeline.errors import UserError
from fastslow_scale.monitor.metrics import FILE_NAME, Record, RunSummary, read_metrics
from fastslow_scale.study.arms import Arm, Size, size_of
from fastslow_scale.study.execute import execute
from fastslow_scale.study.measure import Measured, measure
from fastslow_scale.study.runs import Run, Study
from fastslow_scale.study.statistics import Comparison, compare, holm, spread
from fastslow_scale.train.checkpoint_files import read_manifest

FIRST_STEPS = 2
"""Logged steps left out of a run's step time: allocations and caches settle."""


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        loss: validation loss after the last step, nats a token.
        step_seconds: median over its logged steps.
        records: all of its metrics.jsonl.
        measured: on held-out data, see `Measured`.
    """

    run: Run
    loss: float
    step_seconds: float
    records: list[Record]
    measured: Measured

    @property
    def gates(self) -> list[float]:
        return RunSummary.of(self.records).gate_norms


@dataclass(frozen=True)
class ArmResult:
    """All runs of one arm, seed by seed."""

    arm: Arm
    size: Size
    rate: float
    runs: list[RunResult]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]


@dataclass(frozen=True)
class Compared:
    """Two arms: `variant` minus `baseline`, with the p-value corrected for all comparisons of the study."""

    variant: str
    baseline: str
    result: Comparison
    p_holm: float


@dataclass(frozen=True)
class Ablation:
    """What a study found.

    Attributes:
        arms: in the order they were named.
        compared: each arm with the baseline, then `coupled` (or what stands for it) with each other arm.
        order_losses: the baseline's first seed with other orders of the data.
        sweep: by arm, the validation loss at each learning rate.
        tokens: trained on by each run.
    """

    study: Study
    tokens: int
    arms: dict[str, ArmResult]
    compared: list[Compared]
    order_losses: list[float]
    sweep: dict[str, dict[float, float]]

    @property
    def baseline(self) -> ArmResult:
        return self.arms[self.study.baseline]

    def loss_noise(self) -> float:
        """Standard deviation of the baseline's loss over seeds (weights and order)."""
        return spread(self.baseline.losses)

    def order_noise(self) -> float:
        """Standard deviation of the baseline's loss over orders of the data, the weights the same."""
        return spread([self.baseline.losses[0], *self.order_losses]) if self.order_losses else float("nan")

    def time_ratio(self, arm: str, baseline: str) -> float:
        """Step time of an arm over that of another: median over the seeds of paired runs."""
        pairs = zip(self.arms[arm].runs, self.arms[baseline].runs, strict=True)
        return plain.median(one.step_seconds / other.step_seconds for one, other in pairs)


def ablate(study: Study, jobs: int, nproc: int, console: Console) -> Ablation | None:
    """Do what is left of a study's runs, measure them and compare the arms; None if a signal stopped it.

    Raises:
        UserError: a run's folder holds another run, or its data no longer fits.
        RunError: a run failed.
    """
    sweep: dict[str, dict[float, float]] = {}
    if study.sweep:
        if not execute(study.sweep_runs(), jobs, nproc, console):
            return None
        for run in study.sweep_runs():
            sweep.setdefault(run.arm, {})[run.config().optimizer.lr] = final_loss(run)
        study = study.with_rates({arm: best_rate(losses) for arm, losses in sweep.items()})
    if not execute([*study.runs(), *study.order_runs()], jobs, nproc, console):
        return None
    require_same_data([*study.runs(), *study.order_runs()])
    results = {arm.name: ArmResult(arm, *_of(study, arm), []) for arm in study.arms}
    with console.status("measuring"):
        for run in study.runs():
            results[run.arm].runs.append(_result(run))
    tokens = study.runs()[0].config().train
    return Ablation(
        study=study,
        tokens=tokens.num_steps * tokens.tokens_per_step,
        arms=results,
        compared=compare_arms(results, study.baseline, study.margin),
        order_losses=[final_loss(run) for run in study.order_runs()],
        sweep=sweep,
    )


def best_rate(losses: dict[float, float]) -> float:
    """The rate with the lowest loss; one whose loss is not a number is no candidate."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def require_same_data(runs: Sequence[Run]) -> None:
    """Raise `UserError` where finished runs saw different data: the folder at data.path was made anew between them."""
    seen: dict[str, Run] = {}
    for run in runs:
        manifest = read_manifest(run.folder / f"checkpoints/step_{run.config().train.num_steps:08d}")
        seen.setdefault(manifest["state"]["data_fingerprint"], run)
    if len(seen) > 1:
        one, other, *_ = (str(run.folder) for run in seen.values())
        raise UserError(f"{one} and {other} were trained on different data, so they are not compared")


def _of(study: Study, arm: Arm) -> tuple[Size, float]:
    config = next(run for run in study.runs() if run.arm == arm.name).config()
    return size_of(config), config.optimizer.lr


def _result(run: Run) -> RunResult:
    records = read_metrics(run.folder / FILE_NAME)
    seconds = [record["step_seconds"] for record in records if "step_seconds" in record]
    step_seconds = plain.median(seconds[FIRST_STEPS:] or seconds)
    return RunResult(run, final_loss(run), step_seconds, records, measure(run.folder, run.config()))


def final_loss(run: Run) -> float:
    """The validation loss after the last step, nats a token."""
    last = RunSummary.read(run.folder).last_validation
    assert last is not None, "a finished run"
    return float(last["validation_loss"])


def compare_arms(arms: dict[str, ArmResult], baseline: str, margin: float) -> list[Compared]:
    """Every arm with the baseline, and those with a slow path that learns with every other arm."""
    pairs = [(name, baseline) for name in arms if name != baseline]
    learns = [name for name, result in arms.items() if name != baseline and _learns(result.arm)]
    others = [name for name in arms if name != baseline]
    for one, other in combinations(others, 2):
        if other in learns:
            pairs.append((other, one))
        elif one in learns:
            pairs.append((one, other))
    found = [
        compare([a - b for a, b in zip(arms[one].losses, arms[other].losses, strict=True)], margin)
        for one, other in pairs
    ]
    corrected = holm([result.p_difference for result in found])
    return [Compared(*pair, result, p) for pair, result, p in zip(pairs, found, corrected, strict=True)]


def _learns(arm: Arm) -> bool:
    return "model.variant=coupled" in arm.overrides
