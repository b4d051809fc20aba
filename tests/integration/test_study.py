"""Ablation and diagnosis as a user runs them, on a small model."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastslow_scale.launch.signals import EXIT_START_AGAIN
from fastslow_scale.monitor import read_metrics
from tests.commands import REPOSITORY, environment, fastslow, refused, running
from tests.integration.test_train import exact

pytestmark = pytest.mark.integration

ARMS = ["--variants", "dense,frozen", "--arm", "coupled=coupled slow.gate_lr_multiplier=10", "--seeds", "2"]
KEYS = ["train.max_steps=6", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def study(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven finished runs and their report."""
    output = tmp_path_factory.mktemp("study")
    printed = fastslow("ablate", config_file, *KEYS, *ARMS, "--orders", "1", "--output", output)
    assert "(7 of 7 runs" in printed
    return output


def report_of(study: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((study / "report.json").read_text())
    return report


@pytest.mark.slow
def test_runs_of_a_seed_are_paired_and_frozen_is_dense(study: Path) -> None:
    curves = {(arm, seed): exact(study / arm / str(seed)) for arm in ("dense", "frozen", "coupled") for seed in (0, 1)}
    for seed in (0, 1):
        assert curves["frozen", seed] == curves["dense", seed]
        assert curves["coupled", seed][0][1] == curves["dense", seed][0][1], "the same weights and the same batch"
        assert curves["coupled", seed] != curves["dense", seed]
    assert curves["dense", 0] != curves["dense", 1]
    comparisons = {(each["variant"], each["baseline"]): each for each in report_of(study)["comparisons"]}
    assert set(comparisons) == {("frozen", "dense"), ("coupled", "dense"), ("coupled", "frozen")}
    assert comparisons["frozen", "dense"]["differences"] == [0.0, 0.0]
    assert comparisons["frozen", "dense"]["verdict"] == "equivalent"


@pytest.mark.slow
def test_the_report_holds_what_the_runs_measured(study: Path) -> None:
    report = report_of(study)
    final = {}
    for arm in ("dense", "coupled"):
        records = [read_metrics(study / arm / str(seed) / "metrics.jsonl") for seed in (0, 1)]
        final[arm] = [[r["validation_loss"] for r in each if "validation_loss" in r][-1] for each in records]
        assert report["arms"][arm]["losses"] == final[arm]
    (compared,) = (c for c in report["comparisons"] if (c["variant"], c["baseline"]) == ("coupled", "dense"))
    assert compared["differences"] == [a - b for a, b in zip(final["coupled"], final["dense"], strict=True)]
    assert report["tokens"] == 6 * 8 * 18
    text = (study / "report.md").read_text()
    assert "**frozen** is **dense**, to the last bit: **equivalent**." in text
    assert f"| dense, order 1 | 0 | {report['noise']['order_losses'][0]:.6f} |" in text
    for figure in ("losses", "differences", "positions", "costs", "gates"):
        assert (study / f"{figure}.png").stat().st_size > 5000
    events = EventAccumulator(str(study / "tb" / "coupled-1")).Reload()
    assert events.Scalars("study/validation_loss")[0].value == pytest.approx(final["coupled"][1])


@pytest.mark.slow
def test_another_order_of_the_data_keeps_the_weights(study: Path) -> None:
    reordered, first = exact(study / "orders" / "dense" / "1"), exact(study / "dense" / "0")
    assert reordered[0] != first[0], "another batch"
    start = [read_metrics(study / name / "metrics.jsonl")[0] for name in ("orders/dense/1", "dense/0")]
    assert start[0] == start[1], "the validation loss before the first step"


@pytest.mark.slow
def test_finished_runs_are_only_reported(study: Path, config_file: Path) -> None:
    stamp = (study / "coupled" / "0" / "metrics.jsonl").stat().st_mtime_ns
    printed = fastslow("ablate", config_file, *KEYS, *ARMS, "--output", study)
    assert "6 of 6 runs are finished already" in printed
    assert (study / "coupled" / "0" / "metrics.jsonl").stat().st_mtime_ns == stamp
    wider = refused("ablate", config_file, *KEYS, *ARMS, "study.margin_nats=0.02", "--output", study)
    assert wider.endswith("says margin_nats = 0.01, now it is 0.02: choose another --output")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "dense,unshifted"], "variant unshifted is not trained"),
        (["--variants", "dense", "--baseline", "frozen"], "--baseline frozen is none of the arms dense"),
        (["--variants", ","], "--variants names no variant"),
        (["--lr-sweep", "1e-3,x"], "--lr-sweep must be numbers"),
        (["--lr-sweep", "inf"], "--lr-sweep must be different learning rates above 0"),
        (["--lr-sweep", "1e-3", "--arm", "x=dense optimizer.lr=1"], "--arm x has an optimizer.lr of its own"),
        (["train.seed=3"], "train.seed is the study's own to set"),
        (["model.variant=unshifted"], "model.variant is not trained: a block's mean"),
        (["data.path=/nowhere"], "/nowhere"),
        (["validation.max_sequences=1"], "at least 2 validation sequences (got 1)"),
        (["--arguments-of", "15"], "--arguments-of must be less than the study's 15 runs"),
    ],
)
def test_bad_studies_are_refused(config_file: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in refused("ablate", config_file, *arguments, "--output", tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_the_arguments_of_a_run_start_it(config_file: Path, study: Path, tmp_path: Path) -> None:
    lines = fastslow("ablate", config_file, *KEYS, *ARMS, "--output", tmp_path, "--arguments-of", "5").splitlines()
    assert lines[-1] == f"train.run_dir={tmp_path}/coupled/1", "seed by seed, the arms beside each other"
    fastslow("train", *lines)
    assert exact(tmp_path / "coupled" / "1") == exact(study / "coupled" / "1")


def test_a_failed_run_is_named_with_its_reason(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "study" / "dense" / "0").mkdir(parents=True)
    (tmp_path / "study" / "dense" / "0" / "metrics.jsonl").write_text("")
    printed = fastslow("ablate", config_file, *KEYS, *ARMS, "--output", tmp_path / "study", "--jobs", "1", status=1)
    last = printed.strip().splitlines()[-1]
    assert f"error: run {tmp_path}/study/dense/0 failed: " in last
    assert "holds a run without its config.yaml" in last
    assert not (tmp_path / "study" / "coupled" / "0" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_planted_effect_is_found_and_only_by_information(tmp_path: Path) -> None:
    """The settings, and five seeds, are those of docs/results/planted.md; here one."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planted", "--output", str(tmp_path), "--seeds", "1"],
        capture_output=True, text=True, timeout=600, cwd=REPOSITORY, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shares = {line.split()[0]: [float(s) for s in line.split()[1:]] for line in done.stdout.splitlines()[-3:]}
    assert min(shares["coupled"]) > 0.9
    assert max(shares["dense"] + shares["shuffled"]) < 0.25, "chance is 0.125"


@pytest.mark.slow
def test_a_run_that_lost_its_last_line_is_mended(study: Path, config_file: Path, tmp_path: Path) -> None:
    """As after a kill between the last checkpoint and the validation that follows it."""
    run = tmp_path / "run"
    shutil.copytree(study / "dense" / "1", run)
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["train"]["run_dir"] = str(run)
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    fastslow("train", run / "config.yaml")
    assert metrics.read_text() == whole


@pytest.mark.slow
def test_a_damaged_measurement_is_made_again(study: Path, config_file: Path) -> None:
    path = study / "coupled" / "0" / "measured.json"
    before = json.loads(path.read_text())
    path.write_text("{}")
    fastslow("ablate", config_file, *KEYS, *ARMS, "--output", study)
    assert json.loads(path.read_text()) == before


@pytest.mark.slow
def test_a_sweep_gives_each_arm_its_own_rate(config_file: Path, tmp_path: Path) -> None:
    options = ["--variants", "dense", "--seeds", "1", "--lr-sweep", "1e-6,1e-2", "--output", tmp_path]
    fastslow("ablate", config_file, *KEYS, *options)
    report = report_of(tmp_path)
    assert {arm: each["lr"] for arm, each in report["arms"].items()} == {"dense": 1e-2}
    for losses in report["sweep"].values():
        assert losses["0.01"] < losses["1e-06"]
    assert "optimizer.lr: 0.01" in (tmp_path / "dense" / "0" / "config.yaml").read_text().replace(
        "  lr:", "optimizer.lr:"
    )


@pytest.mark.slow
def test_a_signal_stops_a_study_at_checkpoints_and_it_goes_on(study: Path, config_file: Path, tmp_path: Path) -> None:
    """Every run is stopped once, and none of them notices."""
    command = ["ablate", config_file, *KEYS, *ARMS[:-1], "1", "--output", tmp_path]
    with running(*command) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "validation loss" in line)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_START_AGAIN, rest
    assert rest.splitlines()[-1] == "stopped; the same command goes on from here (exit status 75)"
    fastslow(*command)
    for arm in ("dense", "frozen", "coupled"):
        assert exact(tmp_path / arm / "0") == exact(study / arm / "0")


@pytest.mark.slow
def test_a_diagnosis_of_a_trained_run(study: Path, tmp_path: Path) -> None:
    run = study / "coupled" / "1"
    printed = fastslow("diagnose", run, "--output", tmp_path, "--sequences", "16")
    found = json.loads((tmp_path / "report.json").read_text())
    last = [r["validation_loss"] for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r][-1]
    assert found["loss"] == pytest.approx(last, abs=1e-5), "the same sequences, another way"
    assert len(found["by_position"]) == 18
    assert [exchange["after_layer"] for exchange in found["exchanges"]] == [1, 2]
    for exchange in found["exchanges"]:
        assert exchange["contribution"][:4] == [0.0] * 4
        assert min(exchange["contribution"][4:]) > 0
        assert sum(exchange["spectrum"]) == pytest.approx(1.0)
    assert set(found["rises"]) == {"closed", "swapped", "doubled"}
    assert (tmp_path / "diagnosis.png").stat().st_size > 20_000
    for line in found["verdict"]:
        assert line in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["dense/0"], "variant dense: it has no slow path to diagnose"), (["nowhere"], "nowhere")],
)
@pytest.mark.slow
def test_what_cannot_be_diagnosed_is_refused(study: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    run, *options = arguments
    assert words in refused("diagnose", study / run, *options, "--output", tmp_path / "out")


@pytest.mark.slow
def test_studies_at_two_scales_are_fitted(study: Path, tmp_path: Path) -> None:
    larger = report_of(study) | {"tokens": 10 * report_of(study)["tokens"]}
    (tmp_path / "larger.json").write_text(json.dumps(larger))
    printed = fastslow("scaling", study, tmp_path / "larger.json")
    assert "per tenfold tokens                +0.00000" in printed.replace("-0.00000", "+0.00000")
    assert "all studies are at one scale" in refused("scaling", study)
    assert "is given twice" in refused("scaling", study, study)
    assert "has no arm or key 'coupled'" not in refused("scaling", tmp_path / "no.json")
    assert "has no arm or key 'shuffled'" in refused("scaling", study, "--variant", "shuffled")
