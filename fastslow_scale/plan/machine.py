"""The machine that a plan is for: peaks of one rank, the links between ranks, and which share of the peaks is reached.

Peaks are those of the data sheets (`parallel/hardware.py`), or, for CPUs, measured here when the plan is made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.monitor.peak import measured_flops
from fastslow_scale.parallel.hardware import GPUS

USABLE_MEMORY = 0.92
"""Share of a GPU's memory that tensors may take; the rest is for the CUDA context, NCCL, cuBLAS and gaps. Assumed, not
measured."""


@dataclass(frozen=True)
class Efficiency:
    """The share of a peak that is reached.

    Attributes:
        matmul: of the matrix products' peak. For GPUs the only number that is fitted: on one row of a published table
            for each generation (benchmarks/published.py: llm-foundry's 1b, 2048 tokens, 8 GPUs).
        attention: of the same peak, by the attention kernel.
        memory: of the memory's bandwidth, by element-wise kernels.
        bus: of a link's bandwidth, by collectives.
    """

    matmul: float
    attention: float
    memory: float
    bus: float


AMPERE = Efficiency(matmul=0.73, attention=0.60, memory=0.85, bus=0.80)
HOPPER = Efficiency(matmul=0.61, attention=0.35, memory=0.85, bus=0.80)
"""Attention: FlashAttention-2 reaches 50-73% of an A100 (arXiv 2307.08691, abstract) and 35% of an H100 (arXiv
2407.08608, abstract). Memory and bus are round assumptions. Blackwell takes Hopper's numbers, for want of published
ones."""

CPU = Efficiency(matmul=0.95, attention=0.24, memory=0.57, bus=0.50)
"""Shares of what is measured when the plan is made: those that one model reached on a machine of two cores
(`benchmarks/plan_time.py --fit`), but for the bus, which is assumed."""

LATENCY_SECONDS = 15e-6
"""Of one collective's start; an assumption that matters for small messages only."""


@dataclass(frozen=True)
class Machine:
    """Attributes (per rank unless said otherwise, bytes/s in one direction):
    name: as `--gpu` takes it.
    flops, fp32_flops: peak of matrix products in the run's dtype, and in fp32 without tensor cores, FLOP/s.
    memory_bytes: that tensors may take.
    link_bytes_per_second: between ranks of a node.
    network_bytes_per_second: of a whole node.
    power_watts: 0: not known.
    hides_communication: collectives run beside computation (GPUs) or on the same cores.
    """

    name: str
    nodes: int
    ranks_per_node: int
    flops: float
    fp32_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    power_watts: float
    efficiency: Efficiency
    hides_communication: bool

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"


def machine_for(config: Config, name: str, nodes: int, ranks_per_node: int, network_gbits: float) -> Machine:
    """Raises `UserError`: no such GPU."""
    network = network_gbits * 1e9 / 8
    if name == "cpu":
        return _this_machine(config, nodes, ranks_per_node, network)
    if name not in GPUS:
        raise UserError(f"--gpu must be cpu or one of {', '.join(GPUS)} (got {name})")
    gpu = GPUS[name]
    if not gpu.nvlink_bytes_per_second and ranks_per_node > 1:
        raise UserError(f"--gpu {name} has no NVLink: the links between GPUs of a node are not known")
    return Machine(
        name,
        nodes,
        ranks_per_node,
        gpu.bf16_flops if config.train.dtype == "bf16" else gpu.fp32_flops,
        gpu.fp32_flops,
        gpu.memory_bytes * USABLE_MEMORY,
        gpu.memory_bytes_per_second,
        gpu.nvlink_bytes_per_second,
        network,
        gpu.power_watts,
        AMPERE if name.startswith("a100") else HOPPER,
        hides_communication=True,
    )


def _this_machine(config: Config, nodes: int, ranks_per_node: int, network: float) -> Machine:
    """Ranks share the cores and the memory equally; gloo's messages pass through the memory twice each way."""
    import psutil

    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    flops, bandwidth = measured_flops(torch.device("cpu"), dtype), measured_bandwidth()
    return Machine(
        "cpu",
        nodes,
        ranks_per_node,
        flops / ranks_per_node,
        flops / ranks_per_node,  # here the slow path's attention is in the run's dtype
        psutil.virtual_memory().total / ranks_per_node,
        bandwidth / ranks_per_node,
        bandwidth / ranks_per_node / 4,
        network,
        0.0,
        CPU,
        hides_communication=False,
    )


def measured_bandwidth(size: int = 1 << 26, repetitions: int = 5) -> float:
    """Bytes/s read and written by the best of a few copies of `size` float32 numbers, far more than caches hold."""
    source, target = torch.zeros(size), torch.zeros(size)
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best
