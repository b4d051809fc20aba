"""A loss that is not finite, or a spike, on one rank: no rank's weights change, and the run says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.errors import UserError
from fastslow_scale.config_file import load_config
from fastslow_scale.monitor import read_metrics
from fastslow_scale.parallel.mesh import build_mesh, start_process_group
from fastslow_scale.train import loop
from tests.ranks import run_ranks

pytestmark = pytest.mark.integration

BAD_STEP = 13
KEYS = ["parallel.tensor_parallel_size=2", "checkpoint.every=0", "validation.every=0", "train.spike_window=10"]


def train_with_bad_loss(config: Path, keys: list[str], excess: float, steps: int) -> dict[str, Any]:
    """Train; from step BAD_STEP on, `steps` losses of the last ranks' second micro-batch are larger by `excess`.

    The gradients stay as they are: what keeps them from the weights is the loss alone.
    """
    tree = load_config(config, keys)
    start_process_group()
    mesh = build_mesh(tree.parallel.tensor_parallel_size)
    snapshots: dict[int, list[torch.Tensor]] = {}

    class Spoiled(loop.Trainer):
        def train_step(self, rows: torch.Tensor, measure: bool = False) -> loop.StepResult:
            forward, calls = self.engine.forward, 0
            spoils = mesh.rank >= mesh.world_size - mesh.tp_size and BAD_STEP <= self.step + 1 < BAD_STEP + steps

            def spoiled(*args: Any) -> torch.Tensor:
                nonlocal calls
                calls += 1
                return forward(*args) + (excess if spoils and calls == 2 else 0.0)

            self.engine.forward = spoiled  # type: ignore[method-assign]
            result = super().train_step(rows, measure)
            self.engine.forward = forward  # type: ignore[method-assign]
            snapshots[self.step] = [p.detach().clone() for p in self.engine.model.parameters()]
            return result

    loop.Trainer = Spoiled  # type: ignore[misc]
    stopped = ""
    try:
        loop.train(tree, mesh)
    except UserError as error:
        stopped = str(error)

    def moved(step: int) -> bool:
        pairs = zip(snapshots[step - 1], snapshots[step], strict=True)
        return any(not torch.equal(before, after) for before, after in pairs)

    return {"moved": [moved(step) for step in range(BAD_STEP - 1, max(snapshots) + 1)], "stopped": stopped}


@pytest.mark.parametrize(
    ("excess", "keys", "reason"),
    [
        (float("inf"), ["parallel.zero_stage=1"], "the loss is not finite (inf)"),
        (float("nan"), ["parallel.zero_stage=0"], "the loss is not finite (nan)"),
        (1e5, ["parallel.zero_stage=2", "train.skip_spikes=true"], "is a spike"),
    ],
)
def test_a_bad_step_changes_no_weight_on_any_rank(
    excess: float, keys: list[str], reason: str, config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = [*KEYS, *keys, f"train.run_dir={run}", f"train.max_steps={BAD_STEP + 2}"]
    for result in run_ranks(4, train_with_bad_loss, config_file, given, excess, 1, timeout=120):
        assert result == {"moved": [True, False, True, True], "stopped": ""}
    records = read_metrics(run / "metrics.jsonl")
    [event] = [record for record in records if "event" in record]
    assert (event["step"], event["event"]) == (BAD_STEP, "skipped")
    assert reason in event["reason"]
    assert event["positions"] == [(BAD_STEP - 1) * 8, BAD_STEP * 8 - 1]
    assert [r["skipped_steps"] for r in records if "loss" in r] == [0] * (BAD_STEP - 1) + [1] * 3


def test_a_spike_is_only_marked_unless_asked_for(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = [*KEYS, f"train.run_dir={run}", f"train.max_steps={BAD_STEP}"]
    [first, _] = run_ranks(2, train_with_bad_loss, config_file, given, 1e5, 1, timeout=120)
    assert first["moved"] == [True, True]
    [event] = [record for record in read_metrics(run / "metrics.jsonl") if "event" in record]
    assert (event["step"], event["event"]) == (BAD_STEP, "spike")


def test_too_many_bad_steps_in_a_row_stop_the_run(config_file: Path, tmp_path: Path) -> None:
    given = [*KEYS, f"train.run_dir={tmp_path / 'run'}", "train.max_steps=40", "train.max_bad_steps=3"]
    for result in run_ranks(2, train_with_bad_loss, config_file, given, float("nan"), 40, timeout=120):
        assert result["moved"] == [True, False, False, False]
        assert "3 steps in a row were not applied, the last was step 15" in result["stopped"]
