"""A run that was killed and resumed, as a person sees it: TensorBoard in headless Chromium."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastslow_scale.monitor import read_metrics
from tests import browser
from tests.browser import Browser
from tests.commands import fastslow, kill_group, running

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen") / "run"
    arguments = ["train", config_file, f"train.run_dir={folder}"]
    with running(*arguments) as process:
        assert process.stdout is not None
        awaited = {"step  6/", f"checkpoint {folder}"}
        for line in process.stdout:
            awaited = {start for start in awaited if not line.startswith(start)}
            if not awaited:
                kill_group(process)
                break
    assert "resuming from" in fastslow(*arguments)
    return folder


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with browser.tensorboard(run) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    reason = browser.missing()
    if reason:
        pytest.skip(reason)
    with browser.browser() as window:
        yield window


def ask(address: str, question: str, **values: str) -> Any:
    with urllib.request.urlopen(f"{address}data/{question}?{urllib.parse.urlencode(values)}", timeout=60) as answer:
        return json.load(answer)


def test_the_curves_end_where_the_run_ended(run: Path, address: str, chromium: Browser) -> None:
    chromium.open(f"{address}?tagFilter=loss%2Ftrain#timeseries", "loss/train", "Relative")
    last = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record][-1]
    _, _, value, step = chromium.row("Relative", "tb", 4)  # of the only card that the filter leaves
    assert int(step) == 12
    assert float(value) == pytest.approx(last["loss"], abs=5e-5), "as shown, with four decimals"


def test_the_layout_opens_on_what_matters(address: str, chromium: Browser) -> None:
    titles = ("loss", "size of the gates", "contribution of the slow path", "seconds of a step, by part")
    chromium.open(f"{address}#custom_scalars", "overview", *titles)


def test_pictures_text_and_hyperparameters_are_there(address: str, chromium: Browser) -> None:
    chromium.open(f"{address}#histograms", "coupling/gate/0", "coupling/slow_state/1")
    chromium.open(f"{address}#images", "loss/by_position")
    chromium.open(f"{address}#text", "versions/text_summary", "hidden_size: 16")
    chromium.open(f"{address}#hparams", "gate_lr_multiplier", "variant")


def test_a_resumed_run_is_one_curve(run: Path, address: str) -> None:
    (name,) = ask(address, "plugin/scalars/tags")
    points = ask(address, "plugin/scalars/scalars", run=name, tag="loss/train")
    recorded = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert [step for _, step, _ in points] == list(range(1, 13)), "each step once, in order"
    assert [value for _, _, value in points] == pytest.approx([record["loss"] for record in recorded], rel=1e-6)
    files = list((run / "tb").glob("events.out.tfevents.*"))
    assert len(files) == 2, "the resumed run has a file of its own"
