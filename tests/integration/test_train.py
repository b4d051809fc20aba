"""Training by the command line, from shards to a resumed run."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from data_pipeline.batches import step_batches
from data_pipeline.stream import TokenDataset
from fastslow_scale.config_file import load_config
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.model import build_model
from fastslow_scale.monitor import read_metrics
from fastslow_scale.monitor.logs import curves
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS, CheckpointReader
from tests import wandb_files
from tests.commands import fastslow, kill_group, refused, running

pytestmark = pytest.mark.integration

TWO_RANKS = ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]


def exact(run: Path) -> list[tuple[int, float, float]]:
    """What must not depend on interruptions: step, loss, gradient norm, of each logged step in order."""
    records = read_metrics(run / "metrics.jsonl")
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records if "loss" in record]


def weights(run: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    reader = CheckpointReader(run / "checkpoints" / f"step_{step:08d}")
    return {(name, kind): reader.full(name, kind) for name in reader.names() for kind in (WEIGHTS, *MOMENTS)}


@pytest.fixture(scope="module")
def uninterrupted(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("run") / "uninterrupted"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(run.parent / "extensions")
    return run, fastslow("train", config_file, *TWO_RANKS, f"train.run_dir={run}", "--nproc", 2)


def test_the_run_folder_holds_what_is_promised(uninterrupted: tuple[Path, str]) -> None:
    run, output = uninterrupted
    for name in ("config.yaml", "command", "versions", "tb", "metrics.jsonl", "checkpoints/latest"):
        assert (run / name).exists(), name
    assert (run / "checkpoints/latest").read_text().strip() == "step_00000012"
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 13))
    expected = {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "data_seconds"}
    parts = {f"{part}_seconds" for part in ("forward", "backward", "communication", "optimizer", "other")}
    expected |= parts | {"mfu", "memory_gb"}
    assert set(records[0]) == expected | {"gate_norm", "contribution", "skipped_steps"}
    for record in records:
        assert sum(record[part] for part in parts) + record["data_seconds"] == pytest.approx(record["step_seconds"])
        assert 0 < record["mfu"] < 1
        assert min(record[part] for part in parts) > 0
    assert records[-1]["tokens"] == 12 * 8 * 18
    assert records[0]["gate_norm"] == [0.0, 0.0]
    assert min(records[-1]["gate_norm"]) > 0
    assert records[-1]["loss"] < records[0]["loss"]
    assert "validation loss" in output
    assert "tensorboard" in output


def test_tensorboard_has_every_kind_of_page(uninterrupted: tuple[Path, str]) -> None:
    run = uninterrupted[0]
    events = EventAccumulator(str(run / "tb"), {"images": 0}).Reload()
    tags = events.Tags()
    assert {"loss/train", "loss/validation", "optim/lr", "speed/mfu", "memory/peak_gb", "coupling/gate_norm/1"} <= set(
        tags["scalars"]
    )
    assert {tag.split("/")[0] for tag in tags["scalars"]} <= {"loss", "optim", "speed", "memory", "data", "coupling"}
    assert {"coupling/gate/0", "coupling/slow_state/1"} <= set(tags["histograms"])
    assert [image.step for image in events.Images("loss/by_position")] == [6, 12]
    assert {"config/text_summary", "versions/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )  # fmt: skip
    shown = [tag for chart in layout.category[0].chart for tag in chart.multiline.tag]
    for pattern in shown:
        assert any(re.fullmatch(pattern, tag) for tag in tags["scalars"]), pattern
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["variant"].string_value == "coupled"


def test_a_profile_of_two_steps(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed = fastslow(
        "train", config_file, f"train.run_dir={run}", "train.max_steps=4", "monitor.profile_steps=[2,3]"
    )  # fmt: skip
    trace = json.loads((run / "profile" / "rank_0.pt.trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sorted(name for name in names if name.startswith("step ")) == ["step 2", "step 3"]
    (start,) = (n for n, line in enumerate(printed.splitlines()) if line.startswith("profile of steps 2 to 3: "))
    operators = printed.splitlines()[start + 1 : start + 11]
    assert any(re.fullmatch(r" +\d+\.\d% +\d+x  aten::mm", line) for line in operators), operators
    assert "must be a first and a last step" in refused("train", config_file, "monitor.profile_steps=[3]")


def test_nothing_was_compiled_at_start_up(uninterrupted: tuple[Path, str]) -> None:
    """A compile takes half a minute, and one that was killed leaves a lock on which the next start waits for ever."""
    assert list(uninterrupted[0].parent.glob("extensions/**/*")) == []


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(
    config_file: Path, uninterrupted: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    arguments = ["train", config_file, *TWO_RANKS, f"train.run_dir={run}", "--nproc", 2]
    with running(*arguments) as process:
        assert process.stdout is not None
        awaited = {"step  7/", f"checkpoint {run}"}  # the save goes on beside the steps: either may come first
        for line in process.stdout:
            awaited = {start for start in awaited if not line.startswith(start)}
            if not awaited:
                kill_group(process)
                break
    assert len(exact(run)) >= 7
    output = fastslow(*arguments)
    assert f"resuming from {run / 'checkpoints' / 'step_0000000'}" in output
    assert exact(run) == exact(uninterrupted[0])
    for key, tensor in weights(uninterrupted[0], 12).items():
        assert torch.equal(weights(run, 12)[key], tensor), key


@pytest.mark.slow
def test_compiled_kernels_are_the_same_after_a_resume(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "whole"
    fastslow("train", config_file, "train.compile=true", f"train.run_dir={run}")
    resumed = Path(shutil.copytree(run, tmp_path / "resumed"))
    for step in (8, 12):
        shutil.rmtree(resumed / "checkpoints" / f"step_{step:08d}")
    (resumed / "checkpoints" / "latest").write_text("step_00000004\n")
    output = fastslow("train", config_file, "train.compile=true", f"train.run_dir={resumed}")
    assert f"resuming from {resumed / 'checkpoints' / 'step_00000004'}" in output
    assert exact(resumed) == exact(run)
    for key, tensor in weights(run, 12).items():
        assert torch.equal(weights(resumed, 12)[key], tensor), key


@pytest.mark.slow
def test_damage_is_named_and_passed_over(config_file: Path, uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    run = Path(shutil.copytree(uninterrupted[0], tmp_path / "damaged"))
    oldest, shardless, newest = (run / "checkpoints" / f"step_{step:08d}" for step in (4, 8, 12))
    manifest, shard = newest / "manifest.json", shardless / "tp1_dp0.safetensors"
    manifest.write_bytes(manifest.read_bytes()[:-100])
    shard.unlink()
    arguments = ["train", config_file, *TWO_RANKS, f"train.run_dir={run}", "--nproc", 2]
    assert f"{manifest}: damaged" in refused(*arguments, "--resume", newest)
    lines = fastslow(*arguments).splitlines()
    assert any(line.startswith(f"passed over checkpoint {newest}: {manifest}: damaged") for line in lines), lines
    assert f"passed over checkpoint {shardless}: {shard}: No such file or directory" in lines
    assert f"resuming from {oldest}" in lines
    assert exact(run) == exact(uninterrupted[0])


def test_the_ledger_shows_what_a_step_moves(config_file: Path, tmp_path: Path) -> None:
    keys = [f"train.run_dir={tmp_path / 'run'}", "train.max_steps=3", "monitor.ledger=true"]
    lines = fastslow("train", config_file, *TWO_RANKS, *keys, "--nproc", 2).splitlines()
    # Four micro-batches: pool and spread of two exchanges, 7 norms; the norm's sums of five groups of parameters.
    assert sum(line.startswith("tp all_reduce: 49 calls") for line in lines) == 1, lines
    assert sum(line.startswith("world all_reduce: 1 calls") for line in lines) == 1, lines
    assert not any(line.startswith("dp ") for line in lines)


def test_one_rank_draws_the_same_curve(config_file: Path, uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "one"
    fastslow("train", config_file, f"train.run_dir={run}", "parallel.zero_stage=0")
    got, expected = exact(run), exact(uninterrupted[0])
    assert [step for step, _, _ in got] == [step for step, _, _ in expected]
    assert [loss for _, loss, _ in got] == pytest.approx([loss for _, loss, _ in expected], abs=5e-6, rel=0)
    assert [norm for _, _, norm in got] == pytest.approx([norm for _, _, norm in expected], rel=1e-5)


def test_a_finished_run_says_so_and_ends_well(config_file: Path, uninterrupted: tuple[Path, str]) -> None:
    run = uninterrupted[0]
    before = exact(run)
    output = fastslow("train", config_file, *TWO_RANKS, f"train.run_dir={run}", "--nproc", 2)
    assert "is finished" in output
    assert exact(run) == before


@pytest.mark.slow
def test_the_written_config_starts_the_same_run(uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "again"
    fastslow("train", uninterrupted[0] / "config.yaml", f"train.run_dir={run}", "--nproc", 2)
    assert exact(run) == exact(uninterrupted[0])


def test_a_folder_with_another_run_is_refused(config_file: Path, uninterrupted: tuple[Path, str]) -> None:
    run = uninterrupted[0]
    line = refused("train", config_file, *TWO_RANKS, f"train.run_dir={run}", "optimizer.lr=1e-4", "--nproc", 2)
    assert "optimizer.lr" in line
    assert str(run) in line


def test_documents_kept_apart_have_the_loss_of_the_masked_model(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = [f"train.run_dir={run}", "train.max_steps=1", "data.reset_at_document=true", "validation.max_sequences=2"]
    # Many rows, so that some hold the end of a document, and weights large enough for attention to matter.
    fastslow("train", config_file, *keys, "train.global_batch_size=128", "model.initializer_range=0.3")
    config = load_config(run / "config.yaml")
    dataset, size = TokenDataset.open(config.data.path), config.train.global_batch_size
    rows = next(
        step_batches(dataset, seed=0, start_sample=0, global_batch_size=size, dp_rank=0, dp_size=1, num_workers=0)
    )
    tokens, labels = rows[:, :-1], rows[:, 1:]
    assert (tokens[:, 1:] == dataset.eos_id).any(), "a row with the end of a document"
    model = build_model(config, single_process_mesh(), torch.float64)
    apart = model(tokens, labels, Documents.of_tokens(tokens, dataset.eos_id)).item() / labels.numel()
    [(_, loss, _)] = exact(run)
    assert loss == pytest.approx(apart, abs=1e-5)
    assert abs(apart - model(tokens, labels).item() / labels.numel()) > 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("slow.poolsize=8", "slow.poolsize is not a known key on the command line (did you mean slow.pool_size?)"),
        ("slow.pool_size=1", "slow.pool_size must be at least 2 (got 1) on the command line"),
        ("parallel.tensor_parallel_size=3", "must be a multiple of parallel.tensor_parallel_size = 3"),
        ("train.micro_batch_size=3", "train.global_batch_size must be a multiple of train.micro_batch_size"),
        ("data.path=/nowhere", "/nowhere"),
        ("data.path=null", "data.path is missing"),
        ("train.seq_length=20", "train.seq_length is 20 but"),
        ("model.vocab_size=330", "model.vocab_size is 330 but"),
    ],
)
def test_bad_input_is_one_line(config_file: Path, tmp_path: Path, change: str, words: str) -> None:
    run = tmp_path / "run"
    assert words in refused("train", config_file, f"train.run_dir={run}", change)
    assert not run.exists()


def test_a_run_folder_that_cannot_be_is_refused(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "train.run_dir" in refused("train", config_file, f"train.run_dir={tmp_path / 'file'}")
    assert "train.run_dir" in refused("train", config_file, f"train.run_dir={tmp_path / 'file' / 'run'}")


def test_resuming_from_nothing_is_refused_and_leaves_nothing(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = refused("train", config_file, f"train.run_dir={run}", "--resume", "nonsense")
    assert "--resume nonsense" in line
    assert not run.exists()


def test_an_empty_argument_is_not_this_folder(config_file: Path) -> None:
    assert refused("train", "") == "error: the argument after train must not be empty"
    assert refused("train", config_file, "") == f"error: the argument after {config_file} must not be empty"


def test_ranks_that_do_not_fit_are_refused(config_file: Path, tmp_path: Path) -> None:
    line = refused("train", config_file, *TWO_RANKS, f"train.run_dir={tmp_path}", "--nproc", 3)
    assert "parallel.tensor_parallel_size must divide the number of ranks (got 2 for 3 ranks)" in line


def test_another_batch_does_not_go_on_from_a_checkpoint(
    config_file: Path, uninterrupted: tuple[Path, str], tmp_path: Path
) -> None:
    """Its step would be that of other samples."""
    checkpoint = uninterrupted[0] / "checkpoints" / "step_00000008"
    changed = [f"train.run_dir={tmp_path / 'fork'}", "train.global_batch_size=16", "--resume", checkpoint]
    line = refused("train", config_file, *changed)
    assert line == f"error: train.global_batch_size is 16, but {checkpoint} was trained with 8"


def test_the_first_rank_alone_reports_to_csv_and_wandb(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of metrics.jsonl, once each, as one run; a rollback adds nothing to it."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    run = tmp_path / "run"
    asked = [config_file, *TWO_RANKS, "monitor.csv=true", "monitor.wandb_project=tests", f"train.run_dir={run}"]
    fastslow("train", *asked, "--nproc", 2)
    (file,) = wandb_files.offline_files(run)
    records = read_metrics(run / "metrics.jsonl")
    assert wandb_files.rows(file) == [{"step": record["step"], **dict(curves(record))} for record in records]
    assert wandb_files.run_record(file).project == "tests"

    fastslow("train", *asked, "--nproc", 2, "--resume", run / "checkpoints" / "step_00000008")
    first, second = wandb_files.offline_files(run)
    assert wandb_files.run_record(second).run_id == wandb_files.run_record(first).run_id
    assert wandb_files.rows(second) == []
    with (run / "metrics.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert [(int(row["step"]), float(row["loss"]), float(row["grad_norm"])) for row in rows[1:]] == exact(run)
