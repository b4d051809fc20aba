"""Predicted speed from 8 to 4096 GPUs, coupled beside dense, and where the slow path's costs would first matter.

    .venv/bin/python benchmarks/scaling_curve.py configs/1b.yaml configs/7b.yaml [--gpu h100]

Each config keeps its layout; where its global batch has too few sequences for so many ranks, the micro-batch shrinks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastslow_scale.config_file import load_config
from fastslow_scale.parallel.hardware import NETWORK_GBITS
from fastslow_scale.plan.machine import machine_for
from fastslow_scale.plan.search import Candidate, judge
from fastslow_scale.train.engine import BUCKET_ELEMENTS

GPUS = (8, 64, 512, 4096)


def predicted(path: str, variant: str, gpus: int, gpu: str) -> Candidate | None:
    """None: the global batch has fewer sequences than there are data-parallel ranks."""
    config = load_config(path, [f"model.variant={variant}"])
    share = config.train.global_batch_size * config.parallel.tensor_parallel_size / gpus
    if share < 1:
        return None
    batch = min(config.train.micro_batch_size, int(share))
    config = load_config(path, [f"model.variant={variant}", f"train.micro_batch_size={batch}"])
    return judge(config, machine_for(config, gpu, gpus // 8, 8, NETWORK_GBITS), BUCKET_ELEMENTS)


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
            pair = [predicted(path, variant, gpus, options.gpu) for variant in ("dense", "coupled")]
            dense, coupled = pair
            if dense is None or coupled is None:
                print(f"| {gpus} | the global batch has fewer sequences than data-parallel ranks |" + " |" * 9)
                continue
            own, whole = coupled.time.parts, coupled.time.seconds
            more = [
                (own.get(part, 0.0) - dense.time.parts.get(part, 0.0)) / whole
                for part in ("slow path", "gradients and optimizer", "data-parallel communication")
            ]
            config = coupled.config
            print(
                f"| {gpus} | TP {config.parallel.tensor_parallel_size} x DP {coupled.dp}, "
                f"micro-batch {config.train.micro_batch_size} | {dense.time.tokens_per_second:,.0f} "
                f"| {coupled.time.tokens_per_second:,.0f} | {dense.time.seconds / whole:.3f} | {coupled.time.mfu:.1%} "
                f"| {dense.memory.peak / 1e9:.1f} | {coupled.memory.peak / 1e9:.1f} "
                f"| {more[0]:.1%} | {more[1]:.1%} | {more[2]:.1%} |"
            )


if __name__ == "__main__":
    main()
