"""The DeepSpeed engine around the model: ZeRO, accumulation, the gradient norm, clipping, the guarded step."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastslow_scale.config import Config
from fastslow_scale.model.documents import Documents
from fastslow_scale.parallel.mesh import DeepSpeedMpu, Mesh
from fastslow_scale.parallel.sharing import sharded_dim
from fastslow_scale.train.optimizer import build_optimizer
from fastslow_scale.train.timeline import Timeline


@dataclass(frozen=True)
class Update:
    """What became of one optimizer step: the global gradient norm before clipping, and whether weights changed."""

    grad_norm: float
    applied: bool


class Engine:
    """One optimizer step is `accumulation` rounds of (forward, backward), the last of which ends in the update.

    The gradient norm counts every weight of the model once: sharded weights on every tensor-parallel rank, replicated
    ones on the first. A step whose norm is not finite changes nothing.
    """

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh):
        deepspeed = import_deepspeed()
        self.mesh = mesh
        self.timeline = Timeline(mesh.device)
        self.accumulation = config.gradient_accumulation_steps(mesh.dp_size)
        self.zero_stage = config.parallel.zero_stage
        self.grad_clip = config.optimizer.grad_clip
        self.clip_slow_apart = config.optimizer.clip_slow_apart
        model.to(mesh.device)
        self.optimizer = build_optimizer(model, config)
        self._gather = deepspeed.zero.GatheredParameters
        # DeepSpeed prints its memory use here, on every rank, whatever its logger is told.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            self.deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.optimizer,
                config=engine_settings(config, mesh, max(p.numel() for p in model.parameters())),
                mpu=DeepSpeedMpu(mesh),
            )

    @property
    def model(self) -> Any:
        return self.deepspeed.module

    def gathered(self, params: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """While it is entered, these weights are whole on this rank, ZeRO-3 or not; a collective."""
        return self._gather(list(params), enabled=self.zero_stage == 3)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The summed loss of one micro-batch, [B, T] and [B, T] -> scalar."""
        with self.timeline.part("forward"):
            return self.deepspeed(tokens, labels, documents)

    def backward(
        self, loss_sum: torch.Tensor, valid_tokens: torch.Tensor, discard: torch.Tensor | None = None
    ) -> Update | None:
        """Add a micro-batch's gradient of the step's mean loss; after the last one, clip and update.

        Args:
            loss_sum: this rank's summed loss of the micro-batch. If it is not finite, the step changes nothing.
            valid_tokens: the valid tokens of the whole step, over all ranks and micro-batches.
            discard: a truth value on the device; true, on any rank: the step changes nothing.

        Returns:
            None, or what became of the step after its last micro-batch.
        """
        # DeepSpeed divides by the micro-batches and averages over the data-parallel ranks: both are undone here.
        scale = self.accumulation * self.mesh.dp_size / valid_tokens
        # A NaN here makes the gradient, hence the norm on every rank, NaN too, without any rank asking the others.
        scale = scale + 0 * loss_sum.detach()
        if discard is not None:
            scale = scale.where(~discard, math.nan)
        with self.timeline.part("backward"):
            self.deepspeed.backward(loss_sum * scale)
        with self.timeline.part("optimizer"):
            last = self.deepspeed.is_gradient_accumulation_boundary()
            update = self._unpartitioned_norm_and_clip() if last and self.zero_stage == 0 else None
            self.deepspeed.step()
            if last and update is None:
                skipped = bool(self.deepspeed.optimizer.overflow)
                update = Update(math.inf if skipped else float(self.deepspeed.get_global_grad_norm()), not skipped)
        return update

    def _unpartitioned_norm_and_clip(self) -> Update:
        """ZeRO-0 in fp32 neither reports a norm nor refuses a broken one: do both here, before its step."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.grad is not None]
        slow = [p for name, p in named if self.clip_slow_apart and name.startswith("exchanges.")]
        fast = [p for name, p in named if not (self.clip_slow_apart and name.startswith("exchanges."))]
        norms = [float(global_grad_norm(params, self.mesh)) for params in (fast, slow) if params]
        norm = math.hypot(*norms)
        if not math.isfinite(norm):
            self.deepspeed.zero_grad()
            return Update(math.inf, applied=False)
        for params, own in zip((fast, slow), norms, strict=False):
            if self.grad_clip and own > self.grad_clip:
                torch._foreach_mul_([p.grad for p in params], self.grad_clip / (own + 1e-6))
        return Update(norm, applied=True)


def global_grad_norm(params: list[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """sqrt of the sum of g^2 over every weight of the model, each counted once."""
    counted = [p.grad for p in params if p.grad is not None and (mesh.tp_rank == 0 or sharded_dim(p) is not None)]
    norms = torch._foreach_norm(counted) if counted else []
    squares = torch.stack(list(norms)).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    squares = squares.to(mesh.device)
    dist.all_reduce(squares, group=mesh.tp_group)
    return squares.sqrt()


def engine_settings(config: Config, mesh: Mesh, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration for this run; largest: elements of this rank's largest weight."""
    on_gpu = mesh.device.type == "cuda"
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps(mesh.dp_size),
        "gradient_clipping": config.optimizer.grad_clip if config.parallel.zero_stage else 0.0,
        "bf16": {"enabled": config.train.dtype == "bf16"},
        # In bf16 the sums over micro-batches and over ranks would lose small gradients.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": config.parallel.zero_stage,
            "overlap_comm": on_gpu,
            "contiguous_gradients": True,
            # The default bucket of 5e8 elements is allocated whole, however small the model is.
            "reduce_bucket_size": bucket_elements(config, largest, on_gpu),
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


BUCKET_ELEMENTS = 50_000_000


def bucket_elements(config: Config, largest: int, on_gpu: bool) -> int:
    """DeepSpeed's ZeRO-2 frees a gradient that is larger than a bucket while its reduction may still run beside the
    backward (`stage_1_and_2.py`, `clear_grad_attribute` after the extra-large path): there every gradient fits in one.
    """
    overlapped = on_gpu and config.parallel.zero_stage == 2
    return max(BUCKET_ELEMENTS, largest) if overlapped else BUCKET_ELEMENTS


def import_deepspeed() -> Any:
    """Import DeepSpeed quietly and let it join the process group that the mesh started.

    Its shared-memory collectives for CPUs are turned off: they are compiled at start-up (31 s), and a compile that was
    killed leaves a lock on which the next start waits for ever. The gloo collectives give the same numbers.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.ops import __compatible_ops__
        from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    return deepspeed
