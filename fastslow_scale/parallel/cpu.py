"""What lets megatron-core's tensor- and sequence-parallel layers run on CPU ranks over gloo.

megatron-core 0.16 asks `torch.cuda.current_device()` where it allocates a communication buffer. Without CUDA that
call raises, so it is answered with the CPU device. Nothing is changed on a machine with CUDA.
"""

from __future__ import annotations

import torch


def install_cpu_shim() -> None:
    """Answer `torch.cuda.current_device()` with the CPU device where there is no CUDA. Safe to call twice."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = _cpu_device  # type: ignore[assignment]


def _cpu_device() -> torch.device:
    return torch.device("cpu")
