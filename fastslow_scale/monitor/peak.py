"""The matrix-product speed that model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) is measured against."""

from __future__ import annotations

import resource
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastslow_scale.config import Config
from fastslow_scale.model.flops import count_flops
from fastslow_scale.parallel.hardware import find_gpu

SIZE = {"cpu": 768, "cuda": 8192}
REPETITIONS = 5


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together in this dtype: by the data sheet, or else measured; a collective.

    Ranks measure at the same time, as they train: on one machine they share its cores and its memory.
    """
    own = known_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    if own is None:
        dist.barrier()
        own = measured_flops(device, dtype)
    total = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def known_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of one GPU by its data sheet; None for a GPU or a dtype that the table does not have.

    fp32 products run as TF32 where torch was allowed to (`torch.set_float32_matmul_precision`).
    """
    gpu = find_gpu(device_name)
    if gpu is None:
        return None
    fp32 = gpu.fp32_flops if torch.get_float32_matmul_precision() == "highest" else gpu.tf32_flops
    return {torch.bfloat16: gpu.bf16_flops, torch.float16: gpu.bf16_flops, torch.float32: fp32}.get(dtype)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few square matrix products."""
    size = SIZE["cuda" if device.type == "cuda" else "cpu"]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(REPETITIONS + 1):  # the first one warms up
        _wait_for(device)
        start = time.perf_counter()
        F.linear(a, b)  # the orientation of the model's products: others are slower in bf16 on CPUs
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Utilisation:
    """Model FLOPs utilisation of a run: the products that its config asks for, over what the ranks could have done."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype):
        """A collective, see `peak_flops`."""
        self._peak = peak_flops(device, dtype)
        self._flops_per_step = count_flops(config).training * config.train.global_batch_size

    def of(self, step_seconds: float) -> dict[str, float]:
        """`mfu`, a share."""
        return {"mfu": self._flops_per_step / step_seconds / self._peak}


def memory(device: torch.device) -> dict[str, float]:
    """`memory_gb`: the most that this rank has held, of GPU memory or else resident in memory, in 10^9 bytes."""
    if device.type == "cuda":
        return {"memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    return {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
