"""Checkpoints of real DeepSpeed engines: exact resume at every stage, any layout from any other, failures shared."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_pipeline.errors import UserError
from fastslow_scale.parallel.mesh import DeepSpeedMpu, Mesh, build_mesh, start_process_group
from fastslow_scale.train import checkpoint_files
from fastslow_scale.train.checkpoint import CheckpointReader, find_checkpoint, load_checkpoint, save_checkpoint
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS
from fastslow_scale.train.engine import import_deepspeed
from fastslow_scale.train.zero_fragments import EngineState
from tests.ranks import run_ranks

WORLD_SIZE = 4
GLOBAL_BATCH = 8
MICRO_BATCHES = 2
STEPS = 3  # before the checkpoint, and after it

Tensors = dict[tuple[str, str], torch.Tensor]


class Toy(nn.Module):
    """One weight of each sort: sharded along either dimension, replicated, frozen, unused; odd sizes throughout."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        draw = torch.Generator().manual_seed(seed)
        self.up = self._parameter(draw, (12, 5), tp_dim=0)
        self.up_scale = self._parameter(draw, (12,), tp_dim=0)
        self.down = self._parameter(draw, (7, 12), tp_dim=1)
        self.norm = self._parameter(draw, (7,))
        self.head = self._parameter(draw, (3, 7))
        self.gate = self._parameter(draw, (1,))
        self.unused = self._parameter(draw, (3, 3))
        self.frozen_up = self._parameter(draw, (8, 5), tp_dim=0, trained=False)
        self.frozen_down = self._parameter(draw, (7, 8), tp_dim=1, trained=False)
        self.frozen_scale = self._parameter(draw, (7,), trained=False)

    def _parameter(
        self, draw: torch.Generator, shape: tuple[int, ...], tp_dim: int | None = None, trained: bool = True
    ) -> nn.Parameter:
        whole = torch.randn(shape, generator=draw)
        local = whole if tp_dim is None else whole.chunk(self.mesh.tp_size, tp_dim)[self.mesh.tp_rank].clone()
        parameter = nn.Parameter(local, requires_grad=trained)
        if tp_dim is not None:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, tp_dim, 1
        return parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 5] -> [B, 3]"""
        x = x.to(self.norm.dtype)
        inside = _CopyIn.apply(x, self.mesh.tp_group)
        partial = torch.tanh(inside @ self.up.T * self.up_scale) @ self.down.T
        partial = partial + torch.relu(inside @ self.frozen_up.T) @ self.frozen_down.T
        whole = _SumOut.apply(partial, self.mesh.tp_group)
        return ((whole * self.norm + self.frozen_scale * self.gate) @ self.head.T).float()


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class Setup:
    tp_size: int
    zero_stage: int
    dtype: str = "fp32"

    def __str__(self) -> str:
        return f"TP{self.tp_size} ZeRO-{self.zero_stage} {self.dtype}"


class Run:
    """An engine around a toy, and its data."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.mesh = mesh_of(setup.tp_size)
        self.micro_batch = GLOBAL_BATCH // self.mesh.dp_size // MICRO_BATCHES
        model = Toy(self.mesh, seed)
        matrices = [model.up, model.down, model.head, model.unused]
        groups = [
            {"params": matrices, "lr": 2e-2, "weight_decay": 0.1},
            {"params": [model.up_scale, model.norm], "lr": 1e-2, "weight_decay": 0.0},
            {"params": [model.gate], "lr": 3e-2, "weight_decay": 0.0, "eps": 1e-15},
        ]
        settings = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": setup.dtype == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            # A threshold between the sizes: some parameters stay gathered, others do not.
            "zero_optimization": {
                "stage": setup.zero_stage,
                "stage3_param_persistence_threshold": 10,
                "reduce_bucket_size": 1000,
                "allgather_bucket_size": 1000,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = import_deepspeed().initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, fused=True),
            config=settings,
            mpu=DeepSpeedMpu(self.mesh),
        )

    def train(self, first_step: int, steps: int = STEPS) -> list[float]:
        """The losses of the whole batch at each step."""
        return [self._step(step) for step in range(first_step, first_step + steps)]

    def _step(self, step: int) -> float:
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(GLOBAL_BATCH, 5, generator=draw), torch.randn(GLOBAL_BATCH, 3, generator=draw)
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            first = (micro_batch * self.mesh.dp_size + self.mesh.dp_rank) * self.micro_batch
            rows = slice(first, first + self.micro_batch)
            loss = (self.engine(inputs[rows]) - targets[rows]).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / (MICRO_BATCHES * self.mesh.dp_size)
        dist.all_reduce(total, group=self.mesh.dp_group)
        return total.item()

    def save(self, folder: Path, step: int = STEPS, keep: int = 9) -> Path:
        rank_state = {"rng": torch.full((3,), self.mesh.rank)}
        return save_checkpoint(self.engine, self.mesh, folder, step, {"consumed": [step, 0.5]}, keep, rank_state)

    def full(self, folder: Path) -> Tensors:
        """All masters and moments, whole, by way of a checkpoint in `folder`."""
        return read_all(self.save(folder))


def read_all(path: Path) -> Tensors:
    reader = CheckpointReader(path)
    return {(name, kind): reader.full(name, kind) for name in reader.names() for kind in (WEIGHTS, *MOMENTS)}


def same(left: Tensors, right: Tensors) -> bool:
    """Bitwise."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


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


# --- help ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def mesh_of(tp_size: int) -> Mesh:
    """Building a mesh ends the groups of the one before, which two engines of the same layout share."""
    return build_mesh(tp_size)


def expect(condition: bool, complaint: str) -> None:
    """Asserts on all ranks at once, so that none goes on alone."""
    complaints: list[str | None] = [None] * WORLD_SIZE
    dist.all_gather_object(complaints, None if condition else complaint)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(complaints) if text is not None]
    if wrong:
        raise AssertionError("; ".join(wrong))


def error_of(kind: type[Exception], action: Any) -> str:
    """The message with which `action` fails."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def visible_weights(run: Run) -> dict[str, torch.Tensor]:
    """The weights that the model computes with, gathered where ZeRO-3 has cut them."""
    weights = {}
    for name, parameter in run.engine.module.named_parameters():
        cut = hasattr(parameter, "ds_tensor") and parameter.ds_status.name != "AVAILABLE"
        if cut:
            parameter.all_gather()
        weights[name] = parameter.detach().clone()
        if cut:
            parameter.partition()
    return weights


def same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def counters_of(engine: Any) -> list[int]:
    return [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]


def clear_moments(engine: Any) -> None:
    state = EngineState(engine)
    for fragment in state.fragments:
        for moment in MOMENTS:
            view = state.view(fragment, moment) if fragment.trained else None
            if view is not None:
                view.zero_()


def damage_the_shape(path: Path) -> None:
    """Rewrites the manifest, checksum and all, for a model with another head."""
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = checkpoint_files.read_manifest(path)
        manifest["parameters"]["head"]["shape"] = [7, 3]
        (path / "manifest.json").write_text(checkpoint_files._encode(manifest))
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
