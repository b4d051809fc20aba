"""What a run folder holds, and which checkpoints of other runs may be gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.train import run_folder
from tests.configs import small_config

pytestmark = pytest.mark.unit

CHECKPOINT = Path("runs/base/checkpoints/step_00001000")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.global_batch_size is 16", {"train": {"global_batch_size": 16}}),
        ("train.seq_length is 20", {"train": {"seq_length": 20}}),
        ("model.rope_theta is 5000.0", {"model": {"rope_theta": 5000.0}}),
        ("model.attention_window is 4", {"model": {"attention_window": 4}}),
        ("slow.pool_size is 3", {"slow": {"pool_size": 3}}),
        ("the order of the data is that of seed 9", {"data": {"order_seed": 9}}),
    ],
)
def test_weights_that_would_mean_something_else_are_refused(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{key}.*but {CHECKPOINT} (was trained with|has) "):
        run_folder.refuse_other_function(CHECKPOINT, small_config(), small_config(**changes))


def test_a_fork_may_learn_at_another_rate_and_compute_elsewhere() -> None:
    fork = {
        "train": {"micro_batch_size": 1, "run_dir": "runs/fork"},
        "parallel": {"zero_stage": 2},
        "optimizer": {"lr": 1e-4},
        "slow": {"lr_multiplier": 2.0},
    }
    run_folder.refuse_other_function(CHECKPOINT, small_config(), small_config(**fork))


def test_a_start_that_fails_to_write_leaves_the_config_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: the file is opened, but what goes into it does not."""
    config = small_config(train={"run_dir": tmp_path})
    monkeypatch.setattr(run_folder, "keep_tokenizer", lambda *_: None)
    data: Any = None
    run_folder.open_run_folder(config, "fastslow train", data)
    whole = (tmp_path / "config.yaml").read_bytes()
    assert Config.model_validate(run_folder.load_config(tmp_path / "config.yaml").model_dump()) == config
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        run_folder.open_run_folder(small_config(train={"run_dir": tmp_path, "micro_batch_size": 1}), "x", data)
    assert (tmp_path / "config.yaml").read_bytes() == whole


def full_disk(file: int) -> None:
    raise OSError(28, "No space left on device")
