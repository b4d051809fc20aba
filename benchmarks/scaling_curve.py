"""Predicted speed from 8 to 4096 GPUs, coupled beside dense, and where the slow path's costs would first matter.

    .venv/bin/python benchmarks/scaling_curve.py configs/1b.yaml configs/7b.yaml [--gpu h100]

Each config keeps its layout; where its global batch has too few sequences for so many ranks, the micro-batch shrinks,
and where that is not enough, both variants take the layout that is the fastest for the coupled one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.parallel.hardware import NETWORK_GBITS
from fastslow_scale.plan.machine import machine_for
from fastslow_scale.plan.search import Candidate, judge, ranked
from fastslow_scale.train.engine import BUCKET_ELEMENTS

GPUS = (8, 64, 512, 4096)


def predicted(path: str, gpus: int, gpu: str) -> tuple[Candidate, Candidate]:
    """Dense and coupled, in the same layout."""
    config = load_config(path, ["model.variant=coupled"])
    machine = machine_for(config, gpu, gpus // 8, 8, NETWORK_GBITS)
    share = config.train.global_batch_size * config.parallel.tensor_parallel_size // gpus
    if share:
        config = load_config(path, [f"train.micro_batch_size={min(config.train.micro_batch_size, share)}"])
        coupled = judge(config, machine, BUCKET_ELEMENTS)
    else:
        coupled = ranked(config, machine, BUCKET_ELEMENTS)[0]
    tree = coupled.config.model_dump()
    tree["model"]["variant"] = "dense"
    return judge(Config.model_validate(tree), machine, BUCKET_ELEMENTS), coupled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--gpu", default="h100")
    options = parser.parse_args()
    for path in options.configs:
        print(f"\n{path}, {options.gpu}, predicted\n")
        print(
            "| GPUs | layout | dense tokens/s | coupled tokens/s | coupled / dense | MFU, coupled | GB a rank, dense "
            "| coupled | slow path | its weights in the optimizer | its weights between nodes |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for gpus in GPUS:
            dense, coupled = predicted(path, gpus, options.gpu)
            own, whole = coupled.time.parts, coupled.time.seconds
            more = [
                (own.get(part, 0.0) - dense.time.parts.get(part, 0.0)) / whole
                for part in ("slow path", "gradients and optimizer", "data-parallel communication")
            ]
            parallel, batch = coupled.config.parallel, coupled.config.train.micro_batch_size
            print(
                f"| {gpus} | TP {parallel.tensor_parallel_size} x DP {coupled.dp}, ZeRO-{parallel.zero_stage}, "
                f"micro-batch {batch} | {dense.time.tokens_per_second:,.0f} "
                f"| {coupled.time.tokens_per_second:,.0f} | {dense.time.seconds / whole:.3f} | {coupled.time.mfu:.1%} "
                f"| {dense.memory.peak / 1e9:.1f} | {coupled.memory.peak / 1e9:.1f} "
                f"| {more[0]:.1%} | {more[1]:.1%} | {more[2]:.1%} |"
            )


if __name__ == "__main__":
    main()
