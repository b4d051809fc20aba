"""A DeepSpeed engine around a small model with every sort of weight, and its checkpoints: what checkpoint tests run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastslow_scale.config import CheckpointConfig
from fastslow_scale.parallel.mesh import DeepSpeedMpu, Mesh, build_mesh
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS, CheckpointReader
from fastslow_scale.train.engine import import_deepspeed
from fastslow_scale.train.saver import Saver
from fastslow_scale.train.zero_fragments import EngineState

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

    def saver(self, folder: Path, **settings: Any) -> Saver:
        return Saver(self.engine, self.mesh, folder, CheckpointConfig(**{"keep": 9} | settings), 60)

    def save(self, folder: Path, step: int = STEPS, **settings: Any) -> Path:
        """A checkpoint that is durable when this returns."""
        saver = self.saver(folder, **settings)
        try:
            self.save_with(saver, step)
            return saver.wait()[-1]
        finally:
            saver.close()

    def save_with(self, saver: Saver, step: int = STEPS) -> None:
        saver.save(step, {"consumed": [step, 0.5]}, {"rng": torch.full((3,), self.mesh.rank)})

    def full(self, folder: Path) -> Tensors:
        """All masters and moments, whole, by way of a checkpoint in `folder`."""
        return read_all(self.save(folder))


def read_all(path: Path) -> Tensors:
    reader = CheckpointReader(path)
    return {(name, kind): reader.full(name, kind) for name in reader.names() for kind in (WEIGHTS, *MOMENTS)}


def same(left: Tensors, right: Tensors) -> bool:
    """Bitwise."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@functools.lru_cache(maxsize=1)
def mesh_of(tp_size: int) -> Mesh:
    """Building a mesh ends the groups of the one before, which two engines of the same layout share."""
    return build_mesh(tp_size)


def expect(condition: bool, complaint: str) -> None:
    """Asserts on all ranks at once, so that none goes on alone."""
    complaints: list[str | None] = [None] * dist.get_world_size()
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
