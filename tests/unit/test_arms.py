"""What an ablation compares: the arms, their matched sizes, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from data_pipeline.errors import UserError
from fastslow_scale import cli
from fastslow_scale.config_file import load_config
from fastslow_scale.errors import RunError
from fastslow_scale.study import ablation
from fastslow_scale.study import execute as execution
from fastslow_scale.study.ablation import best_rate, require_same_data
from fastslow_scale.study.ablation_figures import curves
from fastslow_scale.study.arms import MATCHED, Arm, choose_arms, size_of
from fastslow_scale.study.command import run_study
from fastslow_scale.study.runs import OTHER_SEEDS, Run, Study, open_study

pytestmark = pytest.mark.unit

CONFIG = "configs/paper_500k.yaml"


def config_of(arm: Arm, *overrides: str) -> dict[str, dict[str, object]]:
    return load_config(CONFIG, [*overrides, *arm.overrides]).model_dump()


def test_variants_change_nothing_but_the_variant() -> None:
    base = load_config(CONFIG).model_dump()
    for arm in choose_arms(CONFIG, [], ["dense", "frozen", "frozen_slow", "coupled", "shuffled"], []):
        assert config_of(arm) == base | {"model": base["model"] | {"variant": arm.name}}


@pytest.mark.parametrize("overrides", [[], ["slow.num_layers=2", "slow.exchange_after=[1,3]", "slow.hidden_size=192"]])
def test_the_matched_models_are_as_large_or_as_dear_as_the_coupled_one(overrides: list[str]) -> None:
    coupled = size_of(load_config(CONFIG, [*overrides, "model.variant=coupled"]))
    for arm in choose_arms(CONFIG, overrides, list(MATCHED), []):
        config = load_config(CONFIG, [*overrides, *arm.overrides])
        size = size_of(config)
        assert config.model.variant == "dense"
        unit = 3 * config.model.hidden_size * config.model.num_hidden_layers
        if arm.name == "dense_matched_params":
            assert abs(size.parameters - coupled.parameters) <= unit / 2
        else:
            assert abs(size.flops_per_token - coupled.flops_per_token) <= 6 * unit / 2
            assert size.parameters < coupled.parameters


def test_matched_widths_divide_over_tensor_parallel_ranks() -> None:
    (arm,) = choose_arms(CONFIG, ["parallel.tensor_parallel_size=4"], ["dense_matched_params"], [])
    width = load_config(CONFIG, arm.overrides).model.intermediate_size
    assert width > 352
    assert width % 4 == 0


def test_own_arms_are_a_variant_with_changed_keys() -> None:
    own = "fan_in=coupled slow.initializer_range=fan_in slow.gate_lr_multiplier=10"
    (arm,) = choose_arms(CONFIG, [], [], [own])
    config = load_config(CONFIG, arm.overrides)
    assert (arm.name, config.model.variant) == ("fan_in", "coupled")
    assert (config.slow.initializer_range, config.slow.gate_lr_multiplier) == ("fan_in", 10)


@pytest.mark.parametrize(
    ("names", "own", "words"),
    [
        (["unshifted"], [], "shows them the tokens that they are to predict"),
        (["thawed"], [], "variant thawed is not known: choose from dense, frozen"),
        (["dense", "dense"], [], "dense is named twice"),
        ([], ["x"], "--arm must look like"),
        ([], ["x="], r"variant \(none\) is not known"),
        ([], ["../x=dense"], "--arm must look like"),
        ([], ["x=dense slow.pool_sise=4"], "did you mean slow.pool_size"),
        (["shuffled"], ["b=dense train.micro_batch_size=3"], "global_batch_size must be a multiple"),
        ([], ["tb=dense"], "--arm tb: the study has a folder of that name"),
        ([], ["report.md=dense"], "--arm must look like"),
        ([], ["x=coupled train.seed=7"], r"--arm x: train\.seed must be the same for all arms"),
        ([], ["x=dense model.variant=coupled"], r"--arm x: model\.variant must be the same"),
        ([], ["x=dense data.path=/elsewhere"], r"--arm x: data\.path must be the same"),
        ([], ["x=dense train.max_steps=9"], r"--arm x: train\.max_steps must be the same"),
    ],
)
def test_arms_that_cannot_be_are_refused(names: list[str], own: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_arms(Path(CONFIG), [], names, own)


def test_a_study_keeps_what_was_decided_before_its_first_run(tmp_path: Path) -> None:
    def study(*overrides: str, seeds: int = 2, baseline: str = "dense", sweep: tuple[float, ...] = ()) -> Study:
        arms = tuple(choose_arms(CONFIG, overrides, ["dense", "coupled"], []))
        margin = load_config(CONFIG, overrides).study.margin_nats
        return Study(CONFIG, overrides, arms, baseline, seeds, margin, tmp_path / "out", sweep=sweep)

    open_study(study())
    open_study(study(seeds=5))
    open_study(study("monitor.log_every=7"))
    for changed, words in (
        (study("study.margin_nats=0.02"), r"margin_nats = 0\.01, now it is 0\.02: choose another --output"),
        (study("optimizer.lr=2e-3"), r"a study with another optimizer\.lr: choose another --output"),
        (study(baseline="coupled"), "baseline = dense, now it is coupled"),
        (study(sweep=(1e-3,)), r"sweep = \[\], now it is \[0\.001\]"),
    ):
        with pytest.raises(UserError, match=words):
            open_study(changed)
    kept = tmp_path / "out" / "study.json"
    young = json.loads(kept.read_text())
    assert young["config"]["train"].pop("recompute") == "none"
    kept.write_text(json.dumps(young))  # as an earlier version wrote it, which had no such key
    open_study(study())
    with pytest.raises(UserError, match=r"a study with another train\.recompute"):
        open_study(study("train.recompute=full"))
    for damaged in ("{", "[]", '{"config": null}'):
        kept.write_text(damaged)
        with pytest.raises(UserError, match="is damaged"):
            open_study(study())


def test_the_runs_of_a_study_are_interleaved_and_paired() -> None:
    arms = tuple(choose_arms(CONFIG, [], ["dense", "coupled"], []))
    study = Study(CONFIG, (), arms, "dense", 2, 0.01, Path("out"), orders=1, sweep=(1e-3, 3e-3))
    assert [run.folder for run in study.runs()] == [
        Path(f"out/{arm}/{seed}") for seed in (0, 1) for arm in ("dense", "coupled")
    ]
    assert [run.config().train.seed for run in study.runs()] == [0, 0, 1, 1]
    (order,) = study.order_runs()
    assert (order.config().train.seed, order.config().order_seed) == (0, OTHER_SEEDS + 1), "an order of no seed"
    sweep = [(run.arm, run.config().optimizer.lr, run.config().train.seed) for run in study.sweep_runs()]
    assert sweep == [(arm, rate, OTHER_SEEDS) for rate in (1e-3, 3e-3) for arm in ("dense", "coupled")]
    chosen = study.with_rates({"dense": 3e-3, "coupled": 1e-3})
    assert [run.config().optimizer.lr for run in chosen.runs()] == [3e-3, 1e-3, 3e-3, 1e-3]
    assert chosen.order_runs()[0].config().optimizer.lr == 3e-3


def test_shuffled_needs_another_sequence_in_the_micro_batch() -> None:
    with pytest.raises(UserError, match=r"train\.micro_batch_size .*at least 2 with model\.variant = shuffled"):
        choose_arms(CONFIG, ["train.micro_batch_size=1"], ["shuffled"], [])


def test_a_run_that_was_stopped_by_itself_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saved and asks to be started again, status 75; its last validation is not that of a finished run."""
    study = Study(CONFIG, (), tuple(choose_arms(CONFIG, [], ["dense"], [])), "dense", 1, 0.01, tmp_path)

    def stopped(run: Run, slot: int, nproc: int, threads: int) -> execution.Going:
        run.folder.mkdir(parents=True)
        log = (run.folder / "log").open("ab")
        program = "print('stopped by SIGTERM after step 3'); raise SystemExit(75)"
        return execution.Going(run, slot, subprocess.Popen([sys.executable, "-c", program], stdout=log), log, 0.0)

    monkeypatch.setattr(execution, "_start", stopped)
    with pytest.raises(RunError, match="dense/0 failed: stopped by SIGTERM after step 3"):
        execution.execute(study.runs(), 1, 1, Console(quiet=True))


def test_each_run_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of two ranks side by side on four GPUs; a slot is free again when its run ends."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert execution.visible_gpus() == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    given: list[str] = []

    class Ended:
        returncode = 0

        def __init__(self, command: list[str], **kwargs: Any):
            given.append(kwargs["env"]["CUDA_VISIBLE_DEVICES"])

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(execution.subprocess, "Popen", Ended)
    monkeypatch.setattr(execution, "LOOK_SECONDS", 0)
    finished = iter([False] * 4 + [True] * 4)
    monkeypatch.setattr(Run, "finished", lambda run: next(finished))
    monkeypatch.setattr(execution, "_line", lambda *args: "")
    study = Study(CONFIG, (), tuple(choose_arms(CONFIG, [], ["dense"], [])), "dense", 4, 0.01, tmp_path)
    assert execution.execute(study.runs(), 2, 2, Console(quiet=True))
    assert given == ["4,5", "6,7", "4,5", "6,7"]
    with pytest.raises(UserError, match=r"at most the 4 GPUs \(got 5 x 1\)"):
        run_study(study, 5, 1, Console(quiet=True), "")


def test_a_rate_that_diverged_is_not_the_best() -> None:
    assert best_rate({1.0: math.nan, 1e-2: 4.2, 1e-3: 4.1}) == 1e-3


def test_runs_on_different_data_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(CONFIG, (), tuple(choose_arms(CONFIG, [], ["dense", "coupled"], [])), "dense", 2, 0.01, tmp_path)
    prints = {run.folder: "a" for run in study.runs()}
    monkeypatch.setattr(
        ablation, "read_manifest", lambda path: {"state": {"data_fingerprint": prints[path.parents[1]]}}
    )
    require_same_data(study.runs())
    prints[tmp_path / "coupled" / "1"] = "b"
    with pytest.raises(UserError, match=r"dense/0 and \S*coupled/1 were trained on different data"):
        require_same_data(study.runs())


def test_curves_hold_the_steps_that_all_runs_have_logged() -> None:
    def run(every: int) -> SimpleNamespace:
        records = [{"tokens": step, "loss": 1.0, "value": [step + every]} for step in range(0, 13, every)]
        return SimpleNamespace(records=records)

    tokens, rows = curves(SimpleNamespace(runs=[run(2), run(3)]), "value")  # type: ignore[arg-type]
    assert tokens.tolist() == [0, 6, 12]
    assert rows.tolist() == [[2, 8, 14], [3, 9, 15]]


def test_the_arguments_of_one_run_of_a_sweep_are_not_known_yet(tmp_path: Path) -> None:
    arguments = ["--variants", "dense", "--lr-sweep", "1e-3,2e-3", "--output", str(tmp_path), "--arguments-of", "0"]
    with pytest.raises(UserError, match="--arguments-of goes without --lr-sweep"):
        cli.app(["ablate", CONFIG, *arguments], standalone_mode=False)
