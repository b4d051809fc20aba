"""What a run tells: the files other programs read, one value a step over resumes, and lines that fit a screen."""

from __future__ import annotations

import io
import json
import math
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.monitor import Monitor, NullMonitor, print_summary, read_metrics
from fastslow_scale.monitor.console import WIDTH, Console, tensorboard_arguments
from fastslow_scale.monitor.metrics import MetricsLog, RunSummary

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(REPOSITORY / "configs" / "tiny.yaml")


def step_record(step: int, loss: float = 5.0) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": step * 4096,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_second": 2048.0,
        "step_seconds": 2.0,
        "data_seconds": 0.01,
        "gate_norm": [0.001 * step, 0.002 * step],
        "contribution": [0.1, 0.2],
    }


# metrics.jsonl


def test_records_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, start_step=0) as log:
        log.write(step_record(10, loss=1 / 3))
        assert read_metrics(path) == [step_record(10, loss=1 / 3)]  # already on its way to the disk
        log.write_validation(10, 4.5)
    assert read_metrics(path) == [step_record(10, loss=1 / 3), {"step": 10, "validation_loss": 4.5}]


def test_numbers_json_does_not_know_stay_strict_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, start_step=0) as log:
        log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "gate_norm": [-math.inf, 1.0]})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == math.inf and record["gate_norm"] == [-math.inf, 1.0]


def test_a_resumed_run_has_one_value_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, start_step=0) as log:
        log.write_validation(0, 9.0)
        for step in (10, 20, 30, 40):
            log.write(step_record(step))
            log.write_validation(step, 8.0)
    with MetricsLog(path, start_step=20) as log:
        assert not log.write_validation(20, 8.0)
        for step in (30, 40, 50):
            log.write(step_record(step, loss=1.0))
    records = read_metrics(path)
    assert [r["step"] for r in records if "loss" in r] == [10, 20, 30, 40, 50]
    assert [r["loss"] for r in records if "loss" in r] == [5.0, 5.0, 1.0, 1.0, 1.0]
    assert [r["step"] for r in records if "validation_loss" in r] == [0, 10, 20]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_starts_over_starts_the_file_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsLog(path, start_step=0) as log:
            assert log.write_validation(0, 9.0)
            log.write(step_record(10))
    assert [r["step"] for r in read_metrics(path)] == [0, 10]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, start_step=0) as log:
        log.write(step_record(10))
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert read_metrics(path) == [step_record(10)]
    with MetricsLog(path, start_step=10) as log:
        log.write(step_record(20))
    assert read_metrics(path) == [step_record(10), step_record(20)]


@pytest.mark.parametrize("damaged", ["{nonsense}\n", "[1, 2]\n", '{"loss": 1}\n'])
def test_damage_elsewhere_is_named(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + damaged + '{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        read_metrics(path)


def test_missing_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


# TensorBoard


def curves(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir / "tb"))
    accumulator.Reload()
    return accumulator


def curve(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_the_groups_people_look_for(tmp_path: Path, config: Config) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=20) as monitor:
        monitor.log_validation(0, 7.5)
        monitor.log_step(step_record(10) | {"peak_memory": 3.0})
    events = curves(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        "loss/train",
        "loss/validation",
        "optim/lr",
        "optim/grad_norm",
        "data/tokens",
        "speed/tokens_per_second",
        "speed/step_seconds",
        "speed/data_seconds",
        "coupling/gate_norm/0",
        "coupling/gate_norm/1",
        "coupling/contribution/0",
        "coupling/contribution/1",
        "other/peak_memory",
    }
    assert curve(events, "loss/validation") == [(0, 7.5)]
    assert curve(events, "coupling/gate_norm/1") == [(10, pytest.approx(0.02))]
    (text,) = events.Tensors("config/text_summary")
    assert b"pool_size: 8" in text.tensor_proto.string_val[0]


def test_a_kill_loses_nothing_that_was_logged_before(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from fastslow_scale.monitor.tensorboard import TensorBoardLog
log = TensorBoardLog(Path(sys.argv[1]), start_step=0)
log.write({"step": 10} | {f"value_{n}": 1.0 for n in range(200)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "tb")], cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(curves(tmp_path).Tags()["scalars"]) == 200


def test_a_resumed_runs_curves_do_not_overlap(tmp_path: Path, config: Config) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=50) as monitor:
        monitor.log_validation(0, 9.0)
        for step in (10, 20, 30, 40):
            monitor.log_step(step_record(step))
        monitor.log_validation(20, 8.0)
        monitor.log_validation(40, 8.0)
    (first_file,) = (tmp_path / "tb").iterdir()
    with first_file.open("ab") as file:
        file.write(b"\x18\x00\x00\x00\x00\x00\x00\x00half a record")  # what a kill in the middle of a write leaves

    with Monitor(tmp_path, config, start_step=20, total_steps=50) as monitor:
        monitor.log_validation(20, 8.0)
        for step in (30, 40, 50):
            monitor.log_step(step_record(step, loss=1.0))
        monitor.log_validation(40, 2.0)
    events = curves(tmp_path)
    assert curve(events, "loss/train") == [(10, 5.0), (20, 5.0), (30, 1.0), (40, 1.0), (50, 1.0)]
    assert curve(events, "loss/validation") == [(0, 9.0), (20, 8.0), (40, 2.0)]
    in_metrics = [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert in_metrics == curve(events, "loss/train")


def test_a_run_that_starts_over_starts_its_curves_over(tmp_path: Path, config: Config) -> None:
    for loss in (5.0, 4.0):
        with Monitor(tmp_path, config, start_step=0, total_steps=50) as monitor:
            monitor.log_validation(0, loss)
            monitor.log_step(step_record(10, loss))
    assert curve(curves(tmp_path), "loss/train") == [(10, 4.0)]
    assert curve(curves(tmp_path), "loss/validation") == [(0, 4.0)]


def test_tensorboard_can_be_left_out(tmp_path: Path, config: Config) -> None:
    quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"tensorboard": False})})
    with Monitor(tmp_path, quiet, start_step=0, total_steps=20) as monitor:
        monitor.log_step(step_record(10))
    assert not (tmp_path / "tb").exists()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


# The console


def shown(text: io.StringIO) -> list[str]:
    return text.getvalue().splitlines()


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gate_norm": []},
        {"gate_norm": [0.0]},
        {"loss": math.nan, "grad_norm": math.inf},
        {
            "step": 987_654,
            "loss": 12.34567,
            "grad_norm": 12345.6,
            "tokens_per_second": 123_456_789.0,
            "step_seconds": 99.9,
        },
        {"gate_norm": [1.23456e-17] * 12, "tokens_per_second": 0.0},
    ],
)
def test_plain_lines_fit_a_hundred_columns(extra: dict[str, Any]) -> None:
    text = io.StringIO()
    console = Console(0, 1_000_000, rich.console.Console(file=text, width=40))
    console.log_step(step_record(10) | extra)
    console.close()
    (line,) = shown(text)
    assert len(line) <= WIDTH
    assert line.startswith("step") and "/1000000  loss" in line and " left " in line
    assert not line.endswith(" ")


def test_plain_lines_say_what_a_person_needs() -> None:
    text = io.StringIO()
    console = Console(0, 300, rich.console.Console(file=text))
    console.log_step(step_record(20) | {"gate_norm": [0.0123], "tokens_per_second": 23456.0})
    console.log_validation(20, 4.5)
    console.message("checkpoint [bold]step_00000020[/bold]")
    assert shown(text) == [
        "step  20/300  loss 5.0000  lr 1.00e-03  norm 0.5  23.5k tok/s  left 0:09:20  gate 0.0123",
        "validation after step 20: loss 4.5000",
        "checkpoint [bold]step_00000020[/bold]",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_terminal_gets_a_bar_and_its_cursor_back(width: int) -> None:
    text = io.StringIO()
    console = Console(0, 300, rich.console.Console(file=text, force_terminal=True, width=width))
    console.log_step(step_record(30))
    console.log_validation(30, 4.5)
    console.close()
    assert "30/300" in text.getvalue() and "loss 5.0000" in text.getvalue()
    assert "validation after step 30: loss 4.5000" in text.getvalue()
    assert text.getvalue().rindex("\x1b[?25h") > text.getvalue().rindex("\x1b[?25l")


# The summary


def test_the_summary_is_measured_over_all_sessions(tmp_path: Path, config: Config) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=40) as monitor:
        monitor.log_validation(0, 7.5)
        monitor.log_step(step_record(10))
        monitor.log_step(step_record(20))
    with Monitor(tmp_path, config, start_step=10, total_steps=40) as monitor:
        monitor.log_step(step_record(20) | {"tokens_per_second": 4096.0})
        monitor.log_validation(20, 4.25)
    summary = RunSummary.read(tmp_path)
    assert (summary.steps, summary.tokens) == (20, 81920)
    assert summary.training_seconds == pytest.approx(20.0 + 10.0)
    assert summary.tokens_per_second == pytest.approx(81920 / 30)
    assert summary.gate_norms == [pytest.approx(0.02), pytest.approx(0.04)]


def test_the_summary_names_everything_a_user_asks_for(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=10) as monitor:
        monitor.log_validation(0, 7.5)
        monitor.log_step(step_record(10) | {"gate_norm": [0.5], "contribution": [0.25]})
        monitor.log_validation(10, 4.25)
        capsys.readouterr()
        monitor.summary()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["steps", "10"]
    assert "40,960 in 0:00:20 (2,048 tokens/s)" in lines[1]
    assert "7.5000 at step 0, 4.2500 at step 10 (-3.2500)" in lines[2]
    assert "norm 0.5 at exchange 0, contribution 0.25" in lines[3]
    assert lines[4].endswith(f" {tmp_path}")
    assert lines[5].endswith(f"fastslow tensorboard {tmp_path}")
    print_summary(tmp_path)
    assert capsys.readouterr().out.splitlines() == lines


def test_the_best_validation_is_named_where_it_is_not_the_last(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=30) as monitor:
        for step, loss in ((0, 7.5), (10, 4.0), (20, 3.5), (30, 3.75)):
            monitor.log_validation(step, loss)
        monitor.log_step(step_record(30))
        monitor.summary()
    assert "best validation  3.5000 at step 20" in capsys.readouterr().out


def test_what_tensorboard_is_started_with(tmp_path: Path, config: Config) -> None:
    runs = [tmp_path / name for name in ("a", "b", "b:c", "empty")]
    for run in runs[:3]:
        with Monitor(run, config, start_step=0, total_steps=1):
            pass
    runs[3].mkdir()
    assert tensorboard_arguments(runs[:1], 0) == ["--logdir", str(runs[0]), "--host", "localhost", "--port", "0"]
    assert tensorboard_arguments(runs[:2], 1)[:2] == ["--logdir_spec", f"{runs[0]}:{runs[0]},{runs[1]}:{runs[1]}"]
    with socket.create_server(("localhost", 0)) as taken, pytest.raises(UserError, match="is in use"):
        tensorboard_arguments([runs[0]], taken.getsockname()[1])
    for wrong, words in (
        (tmp_path / "no", "does not exist"), (runs[3], "holds nothing that TensorBoard"), (runs[2], "colon")
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            tensorboard_arguments([runs[0], wrong], 0)


def test_a_run_without_a_step_has_a_summary_too(tmp_path: Path, config: Config) -> None:
    with Monitor(tmp_path, config, start_step=0, total_steps=10) as monitor:
        monitor.summary()
    assert RunSummary.read(tmp_path) == RunSummary(0, 0, 0.0, None, None, [], [])


def test_the_null_monitor_takes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with NullMonitor() as monitor:
        monitor.log_step(step_record(10))
        monitor.log_validation(10, 1.0)
        monitor.message("hello")
        monitor.summary()
    assert not list(tmp_path.iterdir())
