"""What `make demo` runs, and a long curve on four ranks: minutes each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.stream import TokenDataset
from fastslow_scale.monitor import read_metrics
from tests.commands import REPOSITORY, fastslow

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TINY = REPOSITORY / "configs" / "tiny.yaml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    fastslow("data", "demo", "--output", folder)
    return folder


def unigram_entropy(data: TokenDataset) -> float:
    """Nats a token of the best model that ignores context, fitted to the training targets themselves."""
    targets = data.rows(range(data.num_samples))[:, 1:].flatten().numpy()
    counts = np.bincount(targets[targets != data.pad_id])
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def test_the_demo_learns_more_than_which_tokens_are_frequent(demo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    half = ["train.max_steps=80", f"data.path={demo}", f"train.run_dir={run}"]
    output = fastslow("train", TINY, *half, "--nproc", 2, timeout=900)
    losses = [r["validation_loss"] for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r]
    entropy = unigram_entropy(TokenDataset.open(demo, split="train"))
    assert losses[0] == pytest.approx(np.log(2048), abs=0.1)
    assert losses[-1] < entropy
    assert "fastslow tensorboard" in output
    said = fastslow("generate", run, "--prompt", "In the beginning", "--max-tokens", 20)
    assert said.startswith("In the beginning")
    assert len(said) > len("In the beginning") + 10


def test_four_ranks_are_tensor_times_data_parallel(demo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["train.max_steps=2", "validation.max_sequences=8"]
    fastslow("train", TINY, f"data.path={demo}", f"train.run_dir={run}", *short, "--nproc", 4)
    manifest = json.loads((run / "checkpoints" / "step_00000002" / "manifest.json").read_text())
    assert manifest["layout"] == {"tp_size": 2, "dp_size": 2, "zero_stage": 1}


def test_three_hundred_steps_on_four_ranks_draw_the_curve_of_one(config_file: Path, tmp_path: Path) -> None:
    curves = []
    layouts = {
        1: [],
        4: ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true", "parallel.zero_stage=1"],
    }
    for ranks, layout in layouts.items():
        run = tmp_path / str(ranks)
        keys = ["train.max_steps=300", "train.micro_batch_size=4", f"train.run_dir={run}"]
        keys += ["checkpoint.every=0", "validation.every=0"]
        fastslow("train", config_file, *keys, *layout, "--nproc", ranks, timeout=600)
        curves.append(np.array([r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]))
    assert len(curves[0]) == len(curves[1]) == 300
    assert curves[0][-1] < curves[0][0] - 0.3, "the model must have learned something"
    worst = np.abs(curves[0] - curves[1]).max()
    print(f"largest difference of the losses over 300 steps: {worst:.2e}")
    assert worst < 1e-3
