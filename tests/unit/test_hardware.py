"""Peaks of GPUs against what their parts add up to, and which of them model FLOPs utilisation is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from fastslow_scale.monitor import peak
from fastslow_scale.parallel.hardware import GPUS, find_gpu

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Parts:
    """What a GPU is made of, by the architecture's white paper.

    multiprocessors, fp32_cores: of the product, not of the full die; an fp32 core does 2 FLOP a clock.
    tensor_flops: dense bf16 FLOP of one multiprocessor's tensor cores in a clock.
    tensor_clock, clock: Hz, boost; tensor-core work has a lower one from Hopper on. None: not published.
    bus_bits, transfers: width of the memory bus, transfers a second on each of its lines.
    links, link_bytes: NVLinks, bytes a second of one in one direction.
    """

    multiprocessors: int
    fp32_cores: int
    tensor_flops: int
    tensor_clock: float | None
    clock: float
    bus_bits: int
    transfers: float
    links: int
    link_bytes: float


# A100: https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf, tables
#   1 and 4 (108 multiprocessors, 1024 FMA a clock each, 1410 MHz); memory clocks 1215 and 1593 MHz (product briefs).
# H100: https://resources.nvidia.com/en-us-tensor-core, "H100 Tensor Core GPU Architecture", tables 3 and 4 (132 or 114
#   multiprocessors, boost 1830 or 1620 MHz for tensor cores, 1980 or 1755 MHz otherwise); memory 2619 and 1593 MHz.
# H200: H100's processor, six stacks of HBM3e, 6144 lines at 3201 MHz (what the driver reports).
# B200: 148 multiprocessors of 128 fp32 cores, 1965 MHz, 7680 lines at 3996 MHz (what the driver reports:
#   https://github.com/pytorch/ao/pull/4002); twice Hopper's tensor cores; their clock is not published.
# L40S: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf and
#   https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413 (18,176 cores, 384 lines of 18 Gbit/s).
A100 = {"multiprocessors": 108, "fp32_cores": 64, "tensor_flops": 2 * 1024, "tensor_clock": 1.41e9, "clock": 1.41e9}
A100_LINKS = {"links": 12, "link_bytes": 25e9}
H100 = {"multiprocessors": 132, "fp32_cores": 128, "tensor_flops": 4 * 1024, "tensor_clock": 1.83e9, "clock": 1.98e9}
H100_LINKS = {"links": 18, "link_bytes": 25e9}
PARTS = {
    "a100": Parts(**A100, **A100_LINKS, bus_bits=5120, transfers=2 * 1593e6),
    "a100-40gb": Parts(**A100, **A100_LINKS, bus_bits=5120, transfers=2 * 1215e6),
    "a100-pcie": Parts(**A100, **A100_LINKS, bus_bits=5120, transfers=2 * 1512e6),
    "h100": Parts(**H100, **H100_LINKS, bus_bits=5120, transfers=2 * 2619e6),
    "h100-pcie": Parts(114, 128, 4 * 1024, 1.62e9, 1.755e9, 5120, 2 * 1593e6, 12, 25e9),
    "h200": Parts(**H100, **H100_LINKS, bus_bits=6144, transfers=2 * 3201e6),
    "b200": Parts(148, 128, 8 * 1024, None, 1.965e9, 7680, 2 * 3996e6, 18, 50e9),
    "l40s": Parts(142, 128, 1024, 2.52e9, 2.52e9, 384, 18e9, 0, 0),
}
EXACT, ROUNDED = 0.01, 0.03
"""Data sheets round bandwidths; L40S's prints 362.05 for what its parts (and half of its own sparse 733) make 366.4."""


@pytest.mark.parametrize("name", PARTS)
def test_peaks_are_what_the_parts_add_up_to(name: str) -> None:
    gpu, parts = GPUS[name], PARTS[name]
    if parts.tensor_clock is not None:
        tensor = parts.multiprocessors * parts.tensor_flops * parts.tensor_clock
        assert gpu.bf16_flops == pytest.approx(tensor, rel=0.015 if name == "l40s" else EXACT)
        assert gpu.tf32_flops == pytest.approx(tensor / 2, rel=EXACT)
    else:
        most = parts.multiprocessors * parts.tensor_flops * parts.clock
        assert 0.9 * most < gpu.bf16_flops < most
        assert gpu.tf32_flops == pytest.approx(gpu.bf16_flops / 2, rel=ROUNDED)
    assert gpu.fp32_flops == pytest.approx(parts.multiprocessors * parts.fp32_cores * 2 * parts.clock, rel=EXACT)
    assert gpu.memory_bytes_per_second == pytest.approx(parts.bus_bits / 8 * parts.transfers, rel=ROUNDED)
    assert gpu.nvlink_bytes_per_second == parts.links * parts.link_bytes


def test_no_peak_is_the_sparse_one() -> None:
    """The sheets print twice the dense speed; where they are the source of all there is to compare with, halve it."""
    sparse = {"h100": 1979e12, "h100-pcie": 1513e12, "h100-nvl": 1671e12, "h200": 1979e12}
    sparse |= {"b200": 4500e12, "gb200": 5000e12}
    for name, flops in sparse.items():
        assert GPUS[name].bf16_flops == pytest.approx(flops / 2, rel=0.001)


def test_every_entry_is_one_gpu() -> None:
    names = [name for gpu in GPUS.values() for name in gpu.device_names]
    assert len(names) == len(set(names))
    for gpu in GPUS.values():
        assert gpu.source.startswith("https://")
        assert gpu.fp32_flops < gpu.tf32_flops < gpu.bf16_flops
        assert all(find_gpu(name) is gpu for name in gpu.device_names)


@pytest.mark.parametrize(
    "name",
    ["", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20", "NVIDIA A10", "NVIDIA L40", "Tesla V100"],
)
def test_a_gpu_that_is_not_in_the_table_is_no_other(name: str) -> None:
    assert find_gpu(name) is None
    assert peak.known_flops(name, torch.bfloat16) is None


@pytest.fixture
def fp32_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_utilisation_is_measured_against_the_precision_of_the_products(fp32_precision: None) -> None:
    torch.set_float32_matmul_precision("highest")
    assert peak.known_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak.known_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak.known_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert peak.known_flops("NVIDIA A100-SXM4-80GB", torch.float64) is None
    torch.set_float32_matmul_precision("high")
    assert peak.known_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
