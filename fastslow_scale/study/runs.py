"""The training runs of an ablation: which there are, what each is started with, and which are finished.

OUTPUT/study.json            what is compared, written before the first run starts
OUTPUT/ARM/SEED              a run folder for each arm and seed
OUTPUT/orders/ARM/K          the baseline's first seed again, with other orders of the data
OUTPUT/sweep/ARM/LR          one run for each arm and learning rate, with a seed that no arm is compared on
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably
from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.monitor.metrics import FILE_NAME, RunSummary
from fastslow_scale.study.arms import Arm
from fastslow_scale.train.run_folder import refuse_other_config

OTHER_SEEDS = 2**31
"""From here on: seeds of runs that are in no comparison, whatever number of seeds a study grows to."""


@dataclass(frozen=True)
class Run:
    """One training run, resumable on its own.

    Attributes:
        overrides: all `section.key=value` that it takes beside the config file.
    """

    arm: str
    seed: int
    folder: Path
    config_path: str
    overrides: tuple[str, ...]

    def config(self) -> Config:
        return load_config(self.config_path, self.overrides)

    def finished(self) -> bool:
        """Whether its last step was validated and saved. Raises `UserError` where the folder holds another run."""
        config, saved = self.config(), self.folder / "config.yaml"
        if not saved.exists() or not (self.folder / FILE_NAME).exists():
            return False
        refuse_other_config(saved, load_config(saved), config)
        last = RunSummary.read(self.folder).last_validation
        step = config.train.num_steps
        return last is not None and last["step"] == step and (self.folder / f"checkpoints/step_{step:08d}").is_dir()


@dataclass(frozen=True)
class Study:
    """What is compared. The arms' learning rates are the config's, or each arm's own after a sweep.

    Attributes:
        margin: nats within which two arms count as equal; chosen before the runs.
        rates: learning rate by arm, where a sweep has chosen it.
    """

    config_path: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    baseline: str
    seeds: int
    margin: float
    output: Path
    orders: int = 0
    sweep: tuple[float, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()

    def runs(self) -> list[Run]:
        """Seed by seed, the arms beside each other: what disturbs the machine for a while disturbs all arms alike."""
        return [self._run(arm, seed, f"{arm.name}/{seed}") for seed in range(self.seeds) for arm in self.arms]

    def order_runs(self) -> list[Run]:
        arm = next(arm for arm in self.arms if arm.name == self.baseline)
        return [
            self._run(arm, 0, f"orders/{arm.name}/{k}", f"data.order_seed={OTHER_SEEDS + k}")
            for k in range(1, self.orders + 1)
        ]

    def sweep_runs(self) -> list[Run]:
        return [
            self._run(arm, OTHER_SEEDS, f"sweep/{arm.name}/{rate!r}", f"optimizer.lr={rate!r}")
            for rate in self.sweep
            for arm in self.arms
        ]

    def with_rates(self, rates: dict[str, float]) -> Study:
        return replace(self, rates=tuple(rates.items()))

    def _run(self, arm: Arm, seed: int, name: str, *more: str) -> Run:
        folder = self.output / name
        rate = dict(self.rates).get(arm.name)
        own = (f"optimizer.lr={rate!r}",) if rate is not None else ()
        overrides = (*self.overrides, *arm.overrides, *own, *more, f"train.seed={seed}", f"train.run_dir={folder}")
        return Run(arm.name, seed, folder, self.config_path, overrides)

    def describe(self) -> dict[str, Any]:
        """What a later start of the same study must agree with; more seeds and arms may be added."""
        config = load_config(self.config_path, self.overrides).model_dump(mode="json")
        for free in ("monitor", "checkpoint", "parallel"):
            config.pop(free)
        config["train"].pop("run_dir")
        return {"margin_nats": self.margin, "baseline": self.baseline, "sweep": list(self.sweep), "config": config}


def open_study(study: Study) -> None:
    """Write study.json, or check that the one there describes the same study.

    Raises:
        UserError: the folder cannot be written, or holds another study: a margin that was chosen before the runs stays.
    """
    path, now = study.output / "study.json", study.describe()
    try:
        study.output.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_durably(path, (json.dumps(now, indent=1) + "\n").encode())
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(before, dict) or not isinstance(before.get("config"), dict):
            raise ValueError("it describes no study")
    except OSError as error:
        raise UserError(f"--output {study.output} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    for key in ("margin_nats", "baseline", "sweep"):
        if before.get(key) != now[key]:
            raise UserError(f"{path} says {key} = {before.get(key)}, now it is {now[key]}: choose another --output")
    for section, values in now["config"].items():
        other = _first_difference(section, before["config"].get(section), values)
        if other:
            raise UserError(f"{study.output} holds a study with another {section}.{other}: choose another --output")


def _first_difference(section: str, before: Any, now: dict[str, Any]) -> str | None:
    """A key with another value. One that `before` lacks is younger than the study, which had its default."""
    if not isinstance(before, dict):
        return next(iter(now))
    fields: dict[str, FieldInfo] = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    for key in sorted(now.keys() | before.keys()):
        default = fields[key].get_default(call_default_factory=True) if key in fields else None
        if key not in now or before.get(key, default) != now[key]:
            return key
    return None
