"""What one optimizer step moves between ranks, by group and kind, coupled beside dense; no rank but this one runs.

python benchmarks/communication.py configs/1b.yaml --world-size 64
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.simplefilter("ignore")

from fastslow_scale.config import Config  # noqa: E402
from fastslow_scale.config_file import load_config  # noqa: E402
from fastslow_scale.model.communication import step_traffic  # noqa: E402
from fastslow_scale.model.model import build_model  # noqa: E402
from fastslow_scale.parallel.ledger import Entries  # noqa: E402
from fastslow_scale.parallel.mesh import Mesh, build_mesh, start_process_group  # noqa: E402
from fastslow_scale.train.engine import BUCKET_ELEMENTS  # noqa: E402
from fastslow_scale.train.optimizer import parameter_groups  # noqa: E402


def traffic(config: Config, mesh: Mesh) -> Entries:
    with torch.device("meta"):
        model = build_model(config, mesh)
    groups = [sum(p.numel() for p in group["params"]) for group in parameter_groups(model, config)]
    return step_traffic(config, groups, mesh.dp_size, BUCKET_ELEMENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--world-size", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    start_process_group()
    coupled, dense = (load_config(options.config, [f"model.variant={name}"]) for name in ("coupled", "dense"))
    dp = coupled.data_parallel_size(options.world_size)
    mesh = build_mesh(coupled.parallel.tensor_parallel_size)
    steps = coupled.gradient_accumulation_steps(dp)
    print(f"{options.config}: {options.world_size} ranks, tensor parallel {mesh.tp_size}, data parallel {dp},")
    train = coupled.train
    print(f"{steps} micro-batches of {train.micro_batch_size} x {train.seq_length} tokens a step and rank\n")
    print("| group | kind | calls, dense | GB, dense | calls, coupled | GB, coupled | ratio |")
    print("|---|---|---|---|---|---|---|")
    before, after = traffic(dense, mesh), traffic(coupled, mesh)
    for (group, kind), entry in sorted(after.items()):
        base = before[group, kind]
        sizes = f"{base.calls} | {base.bytes / 1e9:.3f} | {entry.calls} | {entry.bytes / 1e9:.3f}"
        print(f"| {group} | {kind} | {sizes} | {entry.bytes / base.bytes:.3f} |")


if __name__ == "__main__":
    main()
