"""Checkpoints of real DeepSpeed engines: exact resume at every stage, any layout from any other, failures shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.errors import UserError
from fastslow_scale.parallel.mesh import start_process_group
from fastslow_scale.train import checkpoint_files
from fastslow_scale.train.checkpoint import CheckpointReader, find_checkpoint, find_together, load_checkpoint
from tests.parallel.toy import (
    STEPS,
    Run,
    Setup,
    clear_moments,
    counters_of,
    error_of,
    expect,
    read_all,
    same,
    same_weights,
    visible_weights,
)
from tests.ranks import run_ranks

WORLD_SIZE = 4


# --- what the ranks do ---------------------------------------------------------------------------------------------


def cases(folder: Path) -> dict[str, str]:
    """Runs every case and returns what went wrong, by case. Rank 0's answer counts; asserts hold on all ranks."""
    start_process_group(60)
    wrong = {}
    for name, case in all_cases():
        try:
            case(folder / name.replace(" ", "_"))
        except AssertionError as error:
            wrong[name] = str(error) or "an assertion failed"
    return wrong


def all_cases() -> Iterator[tuple[str, Any]]:
    for setup in SAME_LAYOUT:
        yield f"resume {setup}", lambda folder, setup=setup: resume(folder, setup)
    for before, after in RESHARD:
        yield f"{before} to {after}", lambda folder, pair=(before, after): reshard(folder, *pair)
    yield "failures", failures
    yield "damage", damage
    yield "bytes", bytes_read


SAME_LAYOUT = [
    *(Setup(2, stage) for stage in range(4)),
    *(Setup(2, stage, "bf16") for stage in range(1, 4)),
]
RESHARD = [
    (Setup(2, 1), Setup(4, 1)),
    (Setup(2, 1), Setup(1, 3)),
    (Setup(2, 3), Setup(2, 2)),
    (Setup(2, 0), Setup(1, 1)),
    (Setup(4, 3, "bf16"), Setup(2, 1)),
]


def resume(folder: Path, setup: Setup) -> None:
    """Interrupted = uninterrupted, bit for bit; and without the moments it is not."""
    whole = Run(setup, seed=1)
    whole.train(0)
    path = whole.save(folder)
    counters = counters_of(whole.engine)
    after_save = visible_weights(whole)
    losses = whole.train(STEPS)
    state = whole.full(folder / "uninterrupted")

    resumed = Run(setup, seed=2)
    expect(not same_weights(after_save, visible_weights(resumed)), "two seeds gave the same weights")
    restored = load_checkpoint(resumed.engine, resumed.mesh, path)
    expect(restored.state == {"consumed": [STEPS, 0.5]}, f"state {restored.state}")
    expect(restored.rank_state is not None and int(restored.rank_state["rng"][0]) == resumed.mesh.rank, "rank state")
    expect(counters_of(resumed.engine) == counters, f"counters {counters_of(resumed.engine)} instead of {counters}")
    expect(same_weights(after_save, visible_weights(resumed)), "weights of the model differ after loading")
    expect(resumed.train(STEPS) == losses, "losses differ")
    expect(same(resumed.full(folder / "resumed"), state), "masters or moments differ")

    # Into the same engine, which is elsewhere by now; then again without its moments, which must show.
    load_checkpoint(resumed.engine, resumed.mesh, path)
    expect(resumed.train(STEPS) == losses, "losses differ after loading into a running engine")
    load_checkpoint(resumed.engine, resumed.mesh, path)
    clear_moments(resumed.engine)
    expect(resumed.train(STEPS) != losses, "losses are the same without moments")


def reshard(folder: Path, before: Setup, after: Setup) -> None:
    """Masters and moments are exactly equal at the new layout; the losses are equal within rounding."""
    old = Run(before, seed=1)
    old.train(0)
    path = old.save(folder)
    losses = old.train(STEPS)
    new = Run(after, seed=2)
    restored = load_checkpoint(new.engine, new.mesh, path)
    expect((restored.rank_state is None) == (before.tp_size != after.tp_size), "rank state of another layout")
    expect(same(new.full(folder / "resharded"), read_all(path)), "masters or moments differ")
    tolerance = 5e-6 if before.dtype == after.dtype == "fp32" else 5e-2
    drift = max(abs(a / b - 1) for a, b in zip(new.train(STEPS), losses, strict=True))
    expect(drift < tolerance, f"losses differ by {drift} of their size")


def failures(folder: Path) -> None:
    """One rank's trouble is every rank's error, and changes nothing."""
    run = Run(Setup(2, 1), seed=1)
    run.train(0, steps=1)
    first = run.save(folder, step=1)

    write = checkpoint_files.write_tensors

    def full_disk(path: Path, tensors: Any) -> Any:
        if run.mesh.rank == 2:
            path.write_bytes(b"half")
            raise OSError(f"{path}: No space left on device")
        return write(path, tensors)

    checkpoint_files.write_tensors = full_disk
    try:
        message = error_of(UserError, lambda: run.save(folder, step=2))
    finally:
        checkpoint_files.write_tensors = write
    expect("rank 2" in message and "tp0_dp1.safetensors" in message and "No space left" in message, message)
    dist.barrier()
    expect(sorted(p.name for p in folder.iterdir()) == ["latest", first.name], "the failed save left something behind")
    expect((folder / "latest").read_text() == first.name + "\n", "latest moved")

    message = error_of(UserError, lambda: run.save(folder / "latest", step=3))  # a file where a folder should be
    expect("rank 0" in message and "latest" in message, message)

    run.engine.micro_steps += 1
    message = error_of(RuntimeError, lambda: run.save(folder, step=4))
    expect("accumulation" in message, message)
    run.engine.micro_steps -= 1

    message = error_of(UserError, lambda: load_checkpoint(run.engine, run.mesh, folder / "step_00000009"))
    expect("step_00000009" in message and "manifest.json" in message, message)
    damage_the_shape(first)
    message = error_of(UserError, lambda: load_checkpoint(run.engine, run.mesh, first))
    expect("head" in message, message)


def damage(folder: Path) -> None:
    """Whatever happens to the newest checkpoint, all ranks fall back to the one before, and name the file."""
    run = Run(Setup(2, 1), seed=1)
    run.train(0, steps=1)
    first = run.save(folder, step=1)
    run.train(1, steps=1)
    second = run.save(folder, step=2)
    expect(find_together(folder, "auto") == (second, []), "the sound checkpoint was not taken")
    names = sorted(path.name for path in second.iterdir())
    expect(len(names) == WORLD_SIZE + 1, f"files {names}")
    for name in names:
        content = (second / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        for changed in (flipped, content[:middle], None):
            on_rank_0(lambda changed=changed, file=second / name: put(file, changed))
            found = find_together(folder, "auto")
            expect(found.path == first, f"{name}: took {found.path}")
            expect([path for path, _ in found.passed_over] == [second], f"{name}: passed over {found.passed_over}")
            expect(name in found.passed_over[0][1], f"{name}: {found.passed_over}")
            message = error_of(UserError, lambda: find_together(folder, str(second)))
            expect(str(second / name) in message and "\n" not in message, message)
        on_rank_0(lambda content=content, file=second / name: put(file, content))
    expect(find_together(folder, "auto") == (second, []), "the restored checkpoint was not taken")
    expect(find_together(folder, "never") == (None, []), "never")
    message = error_of(UserError, lambda: find_together(folder, str(folder / "step_9")))
    expect("step_9: no such checkpoint" in message, message)


def put(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def bytes_read(folder: Path) -> None:
    """At the layout that was saved a rank reads what it holds, once; at another no more than the shards it overlaps."""
    read = [0]
    elements = CheckpointReader._elements

    def counted(self: CheckpointReader, *args: Any) -> torch.Tensor:
        found = elements(self, *args)
        read[0] += found.numel()
        return found

    CheckpointReader._elements = counted  # type: ignore[method-assign]
    try:
        run = Run(Setup(2, 3), seed=1)
        run.train(0, steps=1)
        path = run.save(folder)
        load_checkpoint(run.engine, run.mesh, path)
        # Per tensor-parallel rank: 6 x 5 + 6 + 7 x 6 cut, 7 + 21 + 1 + 9 whole, with two moments each, and the frozen.
        held = torch.tensor(read[0])
        dist.all_reduce(held, group=run.mesh.dp_group)
        expect(int(held) == 3 * (78 + 38) + 20 + 28 + 7, f"{int(held)} elements were read")
        read[0] = 0
        other = Run(Setup(4, 1), seed=2)
        load_checkpoint(other.engine, other.mesh, path)
        # `down` and `frozen_down` are cut along their columns: their rows come with the columns of one other rank.
        expect(read[0] == 3 * (15 + 3 + 42 + 38) + 10 + 28 + 7, f"{read[0]} elements were read at another layout")
    finally:
        CheckpointReader._elements = elements  # type: ignore[method-assign]


def damage_the_shape(path: Path) -> None:
    """Rewrites the manifest, checksum and all, for a model with another head."""
    manifest = checkpoint_files.read_manifest(path)
    manifest["parameters"]["head"]["shape"] = [7, 3]
    on_rank_0(lambda: put(path / "manifest.json", checkpoint_files._encode(manifest).encode()))


def on_rank_0(action: Callable[[], object]) -> None:
    """Between two barriers, so that all ranks see the same files before and after."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


# --- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_and_faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(WORLD_SIZE, cases, folder, timeout=180)


@pytest.mark.parallel
@pytest.mark.parametrize("name", [name for name, _ in all_cases()])
def test_case(name: str, folder_and_faults: tuple[Path, list[dict[str, str]]]) -> None:
    for rank, wrong in enumerate(folder_and_faults[1]):
        assert name not in wrong, f"rank {rank}: {wrong[name]}"


@pytest.mark.parallel
def test_one_process_reads_what_four_ranks_wrote(folder_and_faults: tuple[Path, list[dict[str, str]]]) -> None:
    path = find_checkpoint(folder_and_faults[0] / "resume_TP2_ZeRO-1_fp32").path
    assert path is not None
    reader = CheckpointReader(path)
    assert reader.shape("up") == (12, 5)
    assert reader.full("up").shape == (12, 5)
    assert reader.full("frozen_down", "exp_avg").count_nonzero() == 0
    assert reader.full("head", "exp_avg_sq").count_nonzero() > 0
    assert reader.names()[:3] == ["up", "up_scale", "down"]
    assert reader.adam_step("up") == STEPS
    assert reader.adam_step("frozen_up") is None


@pytest.mark.parallel
def test_replicated_weights_are_written_once(folder_and_faults: tuple[Path, list[dict[str, str]]]) -> None:
    path = folder_and_faults[0] / "resume_TP2_ZeRO-0_fp32" / f"step_{STEPS:08d}"
    manifest = json.loads((path / "manifest.json").read_text())
    whole = sum(torch.Size(p["shape"]).numel() for p in manifest["parameters"].values())
    assert sum(entry["elements"]["fp32"] for entry in manifest["files"].values()) == whole
    assert sum(entry["bytes"] for entry in manifest["files"].values()) < 3 * 4 * whole + 4 * 8192
