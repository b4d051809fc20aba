"""Runs on mixed, damaged and remote data: what they log, and that they meet the rows of an undamaged local run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_pipeline.mixture import MixtureOrder
from fastslow_scale.monitor import read_metrics
from tests.commands import fastslow, refused
from tests.unit.data.servers import FileServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same folder under two names: `prose` and, with a damaged member, `code`."""
    root = tmp_path_factory.mktemp("two")
    folders = [Path(shutil.copytree(data, root / name)) for name in ("prose", "code")]
    shard = folders[1] / "train" / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1  # in the first member's payload
    shard.write_bytes(content)
    return folders


def logged(run: Path) -> list[dict[str, float]]:
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.slow
def test_a_mixture_behind_a_url_is_counted_by_source_and_its_damage_is_skipped(
    config_file: Path, two: list[Path], tmp_path: Path
) -> None:
    server = FileServer(two[0].parent)
    try:
        sources = f"[{{path: {two[0]}, weight: 0.25}}, {{path: {server.url}/code, weight: 0.75}}]"
        mixed = ["data.path=null", f"data.sources={sources}", f"data.cache_dir={tmp_path / 'cache'}"]
        run = tmp_path / "run"
        mixed.append(f"train.run_dir={run}")
        stopped = fastslow("train", config_file, *mixed, status=2)
        output = fastslow("train", config_file, *mixed, "data.on_error=skip", "data.num_workers=1", "--nproc", 2)
    finally:
        server.close()
    named = f"{server.url}/code/train/shard-000000.tar member 000000000.bin is damaged (its payload's crc32 differs)"
    assert named in stopped.splitlines()[-1]
    assert output.count(f"warning: replaced by another member: {named}") == 1, "once, whatever ranks and workers met it"
    assert [record["step"] for record in logged(run)] == list(range(1, 13)), "the stopped run went on"
    order = MixtureOrder([0.25, 0.75], seed=0)
    for record in logged(run):
        prose, code = order.counts(int(record["step"]) * 8)
        assert (record["data/tokens/prose"], record["data/tokens/code"]) == (prose * 18, code * 18)
        assert record["data/tokens/prose"] + record["data/tokens/code"] == record["tokens"]
    assert logged(run)[-1]["data/skipped_members"] == 1
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    assert [point.value for point in events.Scalars("data/tokens/code")] == [r["data/tokens/code"] for r in logged(run)]


def test_bad_mixtures_are_refused_before_ranks_start(config_file: Path, data: Path) -> None:
    assert "data.sources must not be given together with data.path" in refused(
        "train", config_file, f"data.sources=[{{path: {data}}}]"
    )
    twice = f"data.sources=[{{path: {data}}}, {{path: {data}}}]"
    assert "two sources named 'shards'" in refused("train", config_file, "data.path=null", twice)
