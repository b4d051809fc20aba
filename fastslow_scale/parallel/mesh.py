"""The one owner of ranks and groups: process group, megatron's groups, and the adapter DeepSpeed asks for.

Ranks are laid out with tensor parallel innermost: rank = dp_rank * tp_size + tp_rank, so that tensor-parallel peers
share a node. NCCL where there are GPUs, gloo elsewhere; nothing else in the project depends on which.
"""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fastslow_scale.errors import RunError
from fastslow_scale.parallel.cpu import install_cpu_shim

DRIVER = Path("/dev/nvidiactl")
ON_CPUS = "set CUDA_VISIBLE_DEVICES to nothing (CUDA_VISIBLE_DEVICES=) to train on CPUs"


@dataclass(frozen=True)
class Mesh:
    """Who this rank is, and the groups it talks in."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_process_group(timeout_seconds: int = 600) -> None:
    """Join the job named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; alone (no RANK), a group of one.

    Raises:
        RunError: this machine has fewer GPUs than ranks, or GPUs that SLURM gave and torch cannot use. Other ranks may
            be well, so that each says it for itself.
    """
    install_cpu_shim()
    if dist.is_initialized():
        return
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if given != "0" and DRIVER.exists() and not hidden and not torch.cuda.is_available():
        raise RunError(
            f"SLURM gave {given} GPUs on {socket.gethostname()}, but torch {torch.__version__} cannot use them: it is "
            f"built without CUDA, or the driver is too old; {ON_CPUS}"
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
    # DeepSpeed insists on it, and takes it for the GPU's number.
    os.environ["LOCAL_RANK"] = str(local_device().index or 0)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def local_device() -> torch.device:
    """The GPU of this rank on its node, or the CPU.

    Raises:
        RunError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    is_task = "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("SLURM_LOCALID") == str(number)
    if count == 1 and is_task:
        number = 0  # SLURM can show each task its own GPU only (--gpus-per-task, --gpu-bind)
    if number >= count:
        raise RunError(f"this machine has more ranks than GPUs: {count}; use --nproc {count}, or {ON_CPUS}")
    return torch.device("cuda", number)


def build_mesh(tensor_parallel_size: int = 1, timeout_seconds: int = 600) -> Mesh:
    """Build megatron's groups for this layout, in place of an earlier layout's. Every rank calls it together.

    timeout_seconds: how long a rank waits for the others of its groups.
    """
    with warnings.catch_warnings():
        # Megatron warns of each optional GPU package that is not installed.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state as state
    if state.model_parallel_is_initialized():
        groups = state._global_process_group_list
        state.destroy_model_parallel()
        for group in groups:
            # Megatron only forgets its groups; each keeps threads and sockets. None stands for the default group.
            if group is not None:
                dist.destroy_process_group(group)
    state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    return Mesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        tp_group=state.get_tensor_model_parallel_group(),
        dp_group=state.get_data_parallel_group(),
        device=local_device(),
    )


def single_process_mesh() -> Mesh:
    """A mesh of this process alone, for sampling, export and counting parameters."""
    start_process_group()
    return build_mesh(1)


def stop_process_group() -> None:
    """Leave the job. Safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


class DeepSpeedMpu:
    """The model-parallel unit that `deepspeed.initialize(mpu=...)` asks about ranks and groups."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.tp_group

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.dp_group

    # The same three under megatron's longer name, which other parts of DeepSpeed use.
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
