"""What would stop a run on this machine: looked for before the run starts, in seconds, without importing torch.

The thorough look (not `quick`) also imports torch, megatron and deepspeed, works on each GPU, and reads one member of
every shard against its checksum.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from data_pipeline.errors import UserError
from data_pipeline.folder import CacheSettings, Span, open_folder
from data_pipeline.index import INDEX_DTYPE, INDEX_NAME, Manifest, load_table
from fastslow_scale.config import Config
from fastslow_scale.versions import versions

GIB = 2**30
LEAST_MEMORY = 1 * GIB
LEAST_DISK = 2 * GIB
GPU_IN_USE = 0.2
GPU_PACKAGES = ("torch", "megatron.core", "deepspeed")


@dataclass
class Report:
    """One machine: what is there, and what would stop a run."""

    host: str
    versions: list[str]
    gpus: list[str] = field(default_factory=list)
    memory_gib: float = 0.0
    disk_gib: float | None = None
    shards: int | None = None
    clock_skew: float = 0.0
    """Seconds that this clock is ahead of the first machine's."""
    machine: str = ""
    """Its own name for itself; `host` is SLURM's."""
    address: str = ""
    """What `machine` means here: gloo tells the other machines to connect there. Empty: an interface is chosen."""
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """For a person."""
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        parts = [gpus, f"{self.memory_gib:.0f} GiB of memory free"]
        parts += [f"{self.disk_gib:.0f} GiB of disk free"] if self.disk_gib is not None else []
        parts += [f"{self.shards} shards"] if self.shards is not None else []
        return f"{self.host}: {', '.join(parts)}, clock {self.clock_skew:+.1f} s"


def examine(config: Config | None, ranks: int | None, quick: bool) -> Report:
    """Look at this machine.

    config: the run that is to start; None: only what does not depend on one.
    ranks: of the whole run; None: whatever the number, it fits.
    """
    report = Report(own_name(), versions(), machine=socket.gethostname(), address=own_address())
    report.problems += [f"{line.split()[0]} is not installed" for line in report.versions if "not installed" in line]
    for look in (_look_at_gpus, _look_at_memory):
        report.problems += look(report)
    if config is not None:
        if ranks is not None:
            config.data_parallel_size(ranks)
        report.problems += _look_at_disk(report, config.train.run_dir)
        report.problems += _look_at_data(report, config, quick)
    if not quick:
        report.problems += _look_closer(report)
    return report


def own_name() -> str:
    """As SLURM calls this machine, so that a person can exclude it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address() -> str:
    """Where gloo listens unless GLOO_SOCKET_IFNAME names an interface: what this machine's name stands for here."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _look_at_gpus(report: Report) -> Iterator[str]:
    """By nvidia-smi, which needs no CUDA context on any of them. None are looked at that the user has hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    given, visible = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and all(name.isdigit() or name.startswith("GPU-") for name in visible.split(",")):
        query.append(f"--id={visible}")  # the others may be other jobs'
        given = min(given, len(visible.split(",")))
    if shutil.which("nvidia-smi"):
        try:
            found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        except (subprocess.SubprocessError, OSError) as error:
            yield f"nvidia-smi failed: {error}"
            return
        for number, line in enumerate(found.strip().splitlines()):
            name, total, used = (part.strip() for part in line.split(","))
            if not total.replace(".", "").isdigit() or not used.replace(".", "").isdigit():
                report.gpus.append(name)  # [N/A]: its memory is the machine's own
                continue
            report.gpus.append(f"{name} {float(total) / 1024:.0f} GiB")
            if float(used) > GPU_IN_USE * float(total):
                yield f"GPU {number}: {float(used) / 1024:.0f} of {float(total) / 1024:.0f} GiB are in use"
    if given and report.gpus and torch_is_for_cpus():
        yield f"SLURM gave {given} GPUs, torch {importlib.metadata.version('torch')} is built without CUDA"
    elif given > len(report.gpus) and not torch_is_for_cpus():
        yield f"SLURM gave {given} GPUs, nvidia-smi shows {len(report.gpus)}"


def torch_is_for_cpus() -> bool:
    """As the wheels for CPUs say in their version."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _look_at_memory(report: Report) -> Iterator[str]:
    free = psutil.virtual_memory().available
    report.memory_gib = round(free / GIB, 1)
    if free < LEAST_MEMORY:
        yield f"only {free / GIB:.1f} GiB of memory are free"


def _look_at_disk(report: Report, run_dir: Path) -> Iterator[str]:
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield f"train.run_dir {run_dir} cannot be written"
        return
    free = shutil.disk_usage(there).free
    report.disk_gib = round(free / GIB, 1)
    if free < LEAST_DISK:
        yield f"only {free / GIB:.1f} GiB are free where train.run_dir {run_dir} lies"


def _look_at_data(report: Report, config: Config, quick: bool) -> Iterator[str]:
    data = config.data
    places = [source.path for source in data.sources] or ([data.path] if data.path else [])
    if not places:
        yield "data.path is missing"
    report.shards = 0
    for place in places:
        try:
            report.shards += _open_shards(place, CacheSettings(data.cache_dir, data.cache_gb), quick)
        except (UserError, OSError) as error:
            yield f"data: {error}"


def _open_shards(place: str, cache: CacheSettings, quick: bool) -> int:
    """Every shard of a data folder is there, has its size and can be opened; returns how many there are."""
    folder = open_folder(place, cache)
    manifest, count = Manifest.load(folder.path), 0
    for split, info in manifest.splits.items():
        index_path = folder.local(f"{split}/{INDEX_NAME}", info.index_sha256)
        index = load_table(index_path, info.index_sha256, INDEX_DTYPE)
        for number, shard in enumerate(info.shards):
            folder.check_size(split, shard)
            if not folder.far_away:
                os.close(folder.open_shard(split, shard))
            if not quick:
                first = next(record for record in index if record["shard"] == number)
                span = Span(int(first["offset"]), int(first["size"]), int(first["crc32"]))
                if zlib.crc32(folder.read(split, shard, span)) != span.crc32:
                    raise UserError(f"{place}/{split}/{shard.name} is damaged")
            count += 1
    return count


def _look_closer(report: Report) -> Iterator[str]:
    """The packages can be imported, and every GPU computes."""
    for name in GPU_PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"
            return
    import torch

    if report.gpus and not torch.cuda.is_available():
        yield f"torch {torch.__version__} cannot use the GPUs: it is built without CUDA, or the driver is too old"
    for number in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{number}")
            if (ones @ ones).sum().item() != 256**3:
                yield f"GPU {number} computes wrongly"
        except RuntimeError as error:
            yield f"GPU {number} cannot be used: {str(error).splitlines()[0]}"
