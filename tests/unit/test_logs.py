"""The same numbers in metrics.csv and at Weights & Biases as in metrics.jsonl, over resumes and rollbacks."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.monitor import Monitor, read_metrics
from fastslow_scale.monitor.logs import curves
from tests import wandb_files
from tests.configs import small_config

pytestmark = pytest.mark.unit


def config_of(**monitor: Any) -> Config:
    return small_config(monitor={"tensorboard": False} | monitor)


def record_of(step: int, loss: float) -> dict[str, Any]:
    speed = {"tokens_per_second": 2048.0, "step_seconds": 2.0}
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 0.1 * loss, **speed, "gate_norm": [loss / 3, 1e-17]}


def report(folder: Path, config: Config, start: int, steps: Sequence[int], loss: float, more: Any = ()) -> None:
    """A start of a run: a validation first, then the steps, with a validation after every twentieth."""
    with Monitor(folder, config, start_step=start, total_steps=100) as monitor:
        monitor.log_validation(start, 9.0)
        for step in steps:
            monitor.log_step(record_of(step, loss + step / 7) | dict(more))
            if step % 20 == 0:
                monitor.log_validation(step, loss + 0.5)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def expected_table(folder: Path) -> dict[int, dict[str, float]]:
    """What metrics.jsonl says, by step."""
    found: dict[int, dict[str, float]] = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        row = found.setdefault(record["step"], {})
        for key, value in record.items():
            row |= {f"{key}/{k}": v for k, v in enumerate(value)} if isinstance(value, list) else {key: value}
    return found


def assert_same_numbers(folder: Path) -> None:
    rows, expected = table(folder), expected_table(folder)
    assert [int(row["step"]) for row in rows] == list(expected)
    for row, numbers in zip(rows, expected.values(), strict=True):
        assert {key: float(cell) for key, cell in row.items() if cell} == numbers


# metrics.csv


def test_no_csv_unless_asked_for(tmp_path: Path) -> None:
    report(tmp_path, config_of(), 0, [10], 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_row_is_a_step_with_its_validation(tmp_path: Path) -> None:
    report(tmp_path, config_of(csv=True), 0, [10, 20, 30, 40], 5.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]
    assert_same_numbers(tmp_path)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    columns = "step,validation_loss,loss,lr,grad_norm,tokens_per_second,step_seconds,gate_norm/0,gate_norm/1"
    assert lines[0] == columns
    assert lines[1] == "0,9.0,,,,,,,"
    loss = 5 + 20 / 7
    assert lines[3] == f"20,5.5,{loss!r},0.001,{0.1 * loss!r},2048.0,2.0,{loss / 3!r},1e-17"


def test_each_number_is_in_the_file_when_it_was_reported(tmp_path: Path) -> None:
    with Monitor(tmp_path, config_of(csv=True), start_step=0, total_steps=100) as monitor:
        for step in (1, 2, 3):
            monitor.log_step(record_of(step, 5.0))
            assert_same_numbers(tmp_path)
            monitor.log_validation(step, 4.0)
            assert_same_numbers(tmp_path)


def test_a_column_that_appears_late(tmp_path: Path) -> None:
    with Monitor(tmp_path, config_of(csv=True), start_step=0, total_steps=100) as monitor:
        monitor.log_step(record_of(1, 5.0))
        monitor.log_step(record_of(2, 5.0) | {"data/tokens/a, b": 7})
        monitor.log_step(record_of(3, 5.0))
        monitor.log_validation(3, 4.0)
        monitor.log_step(record_of(4, 5.0))
    assert_same_numbers(tmp_path)
    assert len(table(tmp_path)) == 4


@pytest.mark.parametrize("first", [{"csv": True}, {}])
def test_csv_follows_a_rollback(first: dict[str, Any], tmp_path: Path) -> None:
    """Also where it is asked for only at the second start."""
    report(tmp_path, config_of(**first), 0, [10, 20, 30, 40], 5.0)
    report(tmp_path, config_of(csv=True), 20, [30, 40, 50], 1.0)
    assert_same_numbers(tmp_path)
    assert [row["step"] for row in table(tmp_path)] == ["0", "10", "20", "30", "40", "50"]
    assert [float(row["loss"]) for row in table(tmp_path)[3:]] == [1 + 30 / 7, 1 + 40 / 7, 1 + 50 / 7]
    report(tmp_path, config_of(csv=True), 0, [10], 2.0)
    assert [row["step"] for row in table(tmp_path)] == ["0", "10"]


def test_a_data_frame_reads_numbers_that_are_none(tmp_path: Path) -> None:
    with Monitor(tmp_path, config_of(csv=True), start_step=0, total_steps=100) as monitor:
        monitor.log_step(record_of(1, math.nan))
        monitor.log_event({"step": 1, "event": "skipped", "reason": "the loss is, nan", "positions": [0, 7]})
        monitor.log_step(record_of(2, math.inf))
        monitor.log_step(record_of(3, 5.0))
    frame = pandas.read_csv(tmp_path / "metrics.csv")
    assert "event" not in frame.columns and "positions/0" not in frame.columns
    assert frame["loss"].isna().tolist() == [True, False, False]
    assert frame["loss"].tolist()[1:] == [math.inf, 5.0]
    report(tmp_path, config_of(csv=True), 3, [4], 5.0)
    assert len(table(tmp_path)) == 4
    assert set(table(tmp_path)[0]) == {*frame.columns, "validation_loss"}


# Weights & Biases, offline


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, beside what else wandb would write into the user's home."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path / "run"


def sent(folder: Path) -> list[dict[str, Any]]:
    """All rows of all starts, in order."""
    return [row for path in wandb_files.offline_files(folder) for row in wandb_files.rows(path)]


def expected_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {"step": record["step"], **dict(curves(record))}
        for record in read_metrics(folder / "metrics.jsonl")
        if "event" not in record
    ]


def test_wandb_has_the_numbers_of_the_run(offline: Path) -> None:
    config = config_of(wandb_project="fast-slow")
    report(offline, config, 0, [10, 20], 5.0)
    (path,) = wandb_files.offline_files(offline)
    assert sent(offline) == expected_rows(offline)
    loss = 5 + 20 / 7
    assert sent(offline)[2] == {
        "step": 20,
        "loss/train": loss,
        "optim/lr": 1e-3,
        "optim/grad_norm": 0.1 * loss,
        "speed/tokens_per_second": 2048.0,
        "speed/step_seconds": 2.0,
        "coupling/gate_norm/0": loss / 3,
        "coupling/gate_norm/1": 1e-17,
    }
    assert sent(offline)[3] == {"step": 20, "loss/validation": 5.5}
    run = wandb_files.run_record(path)
    assert (run.project, run.display_name) == ("fast-slow", "run")
    assert run.run_id == json.loads((offline / "wandb.json").read_text())["id"]
    known = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert known["model"]["hidden_size"] == config.model.hidden_size
    axes = [r.metric for r in wandb_files.records(path) if r.HasField("metric")]
    assert ("*", "step") in [(metric.glob_name, metric.step_metric) for metric in axes]


def test_a_resumed_run_is_the_same_run_at_wandb(offline: Path) -> None:
    """Steps that run again are not sent twice; what was not sent before the end is sent now."""
    config = config_of(wandb_project="fast-slow")
    report(offline, config, 0, [10, 20, 30, 40], 5.0)
    first = expected_rows(offline)
    report(offline, config_of(), 20, [30, 40, 50], 5.0)
    report(offline, config, 40, [50, 60], 5.0)
    one, two = wandb_files.offline_files(offline)
    assert wandb_files.run_record(one).run_id == wandb_files.run_record(two).run_id
    rows = sent(offline)
    assert rows[: len(first)] == first
    assert [row["step"] for row in rows if "loss/train" in row] == [10, 20, 30, 40, 50, 60]
    assert [row["step"] for row in rows if "loss/validation" in row] == [0, 20, 40, 60]
    assert rows == expected_rows(offline)

    report(offline, config, 0, [10], 5.0)
    three = wandb_files.offline_files(offline)[-1]
    assert wandb_files.run_record(three).run_id != wandb_files.run_record(one).run_id
    assert wandb_files.rows(three) == expected_rows(offline)


def test_another_project_gets_the_whole_run(offline: Path) -> None:
    report(offline, config_of(wandb_project="one"), 0, [10, 20], 5.0)
    report(offline, config_of(wandb_project="two"), 20, [30], 5.0)
    assert wandb_files.rows(wandb_files.offline_files(offline)[-1]) == expected_rows(offline)


def test_a_damaged_file_is_named(offline: Path) -> None:
    report(offline, config_of(wandb_project="x"), 0, [10], 5.0)
    (offline / "wandb.json").write_text('{"id": ')
    with pytest.raises(UserError, match=r"wandb\.json is damaged"):
        Monitor(offline, config_of(wandb_project="x"), start_step=10, total_steps=100)


def test_training_goes_on_without_wandb(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fails in the middle of a run; the next start sends what is missing."""
    with Monitor(offline, config_of(wandb_project="x"), start_step=0, total_steps=100) as monitor:
        monitor.log_step(record_of(10, 5.0))
        (log,) = monitor._logs

        def broken(row: dict[str, Any]) -> None:
            raise ConnectionResetError("gone")

        log._run.log = broken  # type: ignore[attr-defined]
        monitor.log_step(record_of(20, 5.0))
        monitor.log_step(record_of(30, 5.0))
    printed = capsys.readouterr().out
    assert printed.count("Weights & Biases gets nothing of this run until its next start") == 1 and "gone" in printed
    assert len(read_metrics(offline / "metrics.jsonl")) == 3
    report(offline, config_of(wandb_project="x"), 30, [40], 5.0)
    assert [row["step"] for row in sent(offline) if "loss/train" in row] == [10, 20, 30, 40]


def test_training_begins_without_wandb(
    offline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that starts again by itself at night must not stay down because a server does."""
    wandb = pytest.importorskip("wandb")

    def unreachable(**settings: Any) -> None:
        raise wandb.errors.CommError("no\nanswer")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", unreachable)
        report(offline, config_of(wandb_project="x"), 0, [10], 5.0)
    assert "CommError: no answer" in capsys.readouterr().out
    report(offline, config_of(wandb_project="x"), 10, [20], 5.0)
    assert sent(offline) == expected_rows(offline)


def test_nothing_is_sent_unless_asked_for(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **settings: pytest.fail("wandb was started"))
    monkeypatch.setenv("WANDB_PROJECT", "asked-for-by-nobody")
    report(offline, config_of(csv=True), 0, [10], 5.0)
    assert not (offline / "wandb").exists() and not (offline / "wandb.json").exists()


def test_what_wandb_refuses_is_one_line(offline: Path) -> None:
    with pytest.raises(UserError, match=r"^monitor\.wandb_project = a/b: .*[Pp]roject name") as raised:
        Monitor(offline, config_of(wandb_project="a/b"), start_step=0, total_steps=100)
    assert len(str(raised.value).splitlines()) == 1
