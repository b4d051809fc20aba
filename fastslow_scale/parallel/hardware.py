"""What the vendor promises of each GPU: the speeds that model FLOPs utilisation and plans are measured against.

All numbers are those of NVIDIA's data sheets, without structured sparsity (the sheets print the double, with a
footnote, from Hopper on), in FLOP/s, bytes and bytes/s with decimal prefixes. tests/unit/test_hardware.py recomputes
them from the number of multiprocessors, their operations a clock, the clocks, the memory bus and the links.
"""

from __future__ import annotations

from dataclasses import dataclass

A100_SHEET = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
H100_SHEET = "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306"
H200_SHEET = (
    "https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200"
)
BLACKWELL_SHEET = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
L40S_SHEET = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"


NETWORK_GBITS = 3200.0
"""Of one node, in one direction: eight adapters of 400 Gb/s, as in DGX H100 and its like."""


@dataclass(frozen=True)
class Gpu:
    """One GPU's peaks.

    device_names: what the driver calls it, word for word: a slice of a GPU (MIG) has a name of its own, and other
        products share parts of these names (GH200 holds H200).
    bf16_flops, tf32_flops: dense products on tensor cores with fp32 accumulation, FLOP/s. fp16 is as fast as bf16.
    fp32_flops: outside the tensor cores, FLOP/s; what a float32 product gets unless TF32 is allowed.
    memory_bytes: as sold, in 10^9 bytes; the driver offers at least as much.
    memory_bytes_per_second: of the GPU's own memory.
    nvlink_bytes_per_second: in one direction, all links of the GPU together; half of what the sheets print. 0: none.
    power_watts: the most that the module may draw, as it is sold (TDP).
    source: the data sheet.
    """

    device_names: tuple[str, ...]
    bf16_flops: float
    tf32_flops: float
    fp32_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float
    power_watts: float
    source: str


GPUS = {
    "a100": Gpu(
        device_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        bf16_flops=312e12,
        tf32_flops=156e12,
        fp32_flops=19.5e12,
        memory_bytes=80e9,
        memory_bytes_per_second=2039e9,
        nvlink_bytes_per_second=300e9,
        power_watts=400,
        source=A100_SHEET,
    ),
    "a100-40gb": Gpu(
        device_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        bf16_flops=312e12,
        tf32_flops=156e12,
        fp32_flops=19.5e12,
        memory_bytes=40e9,
        memory_bytes_per_second=1555e9,
        nvlink_bytes_per_second=300e9,
        power_watts=400,
        source=A100_SHEET,
    ),
    "a100-pcie": Gpu(
        device_names=("NVIDIA A100 80GB PCIe",),
        bf16_flops=312e12,
        tf32_flops=156e12,
        fp32_flops=19.5e12,
        memory_bytes=80e9,
        memory_bytes_per_second=1935e9,
        nvlink_bytes_per_second=300e9,
        power_watts=300,
        source=A100_SHEET,
    ),
    "h100": Gpu(
        device_names=("NVIDIA H100 80GB HBM3",),
        bf16_flops=989.4e12,
        tf32_flops=494.7e12,
        fp32_flops=66.9e12,
        memory_bytes=80e9,
        memory_bytes_per_second=3.35e12,
        nvlink_bytes_per_second=450e9,
        power_watts=700,
        source=H100_SHEET,
    ),
    "h100-pcie": Gpu(
        device_names=("NVIDIA H100 PCIe",),
        bf16_flops=756e12,
        tf32_flops=378e12,
        fp32_flops=51.2e12,
        memory_bytes=80e9,
        memory_bytes_per_second=2.0e12,
        nvlink_bytes_per_second=300e9,
        power_watts=350,
        source=H100_SHEET,
    ),
    "h100-nvl": Gpu(
        device_names=("NVIDIA H100 NVL",),
        bf16_flops=835.5e12,
        tf32_flops=417.5e12,
        fp32_flops=60e12,
        memory_bytes=94e9,
        memory_bytes_per_second=3.9e12,
        nvlink_bytes_per_second=300e9,
        power_watts=400,
        source=H100_SHEET,
    ),
    "h200": Gpu(
        device_names=("NVIDIA H200",),
        bf16_flops=989.4e12,
        tf32_flops=494.7e12,
        fp32_flops=66.9e12,
        memory_bytes=141e9,
        memory_bytes_per_second=4.8e12,
        nvlink_bytes_per_second=450e9,
        power_watts=700,
        source=H200_SHEET,
    ),
    "b200": Gpu(
        device_names=("NVIDIA B200",),
        bf16_flops=2250e12,
        tf32_flops=1100e12,
        fp32_flops=75e12,
        memory_bytes=180e9,
        memory_bytes_per_second=7.7e12,
        nvlink_bytes_per_second=900e9,
        power_watts=1000,
        source=BLACKWELL_SHEET,
    ),
    "gb200": Gpu(
        device_names=("NVIDIA GB200",),
        bf16_flops=2500e12,
        tf32_flops=1250e12,
        fp32_flops=80e12,
        memory_bytes=186e9,
        memory_bytes_per_second=8e12,
        nvlink_bytes_per_second=900e9,
        power_watts=1200,
        source=BLACKWELL_SHEET,
    ),
    "l40s": Gpu(
        device_names=("NVIDIA L40S",),
        bf16_flops=362.05e12,
        tf32_flops=183e12,
        fp32_flops=91.6e12,
        memory_bytes=48e9,
        memory_bytes_per_second=864e9,
        nvlink_bytes_per_second=0,
        power_watts=350,
        source=L40S_SHEET,
    ),
}
"""By the names that `fastslow plan --gpu` takes. A bare name is the SXM module, as HGX and DGX boards carry it."""


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU that the driver calls so (`torch.cuda.get_device_name`), or None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if device_name in gpu.device_names), None)
