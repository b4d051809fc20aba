"""Predicted and measured seconds of one step on this machine's CPU, one rank, at a few sizes.

    .venv/bin/python benchmarks/plan_time.py

The machine must be quiet: the plan measures its peaks first, the steps follow, and what else runs disturbs one more
than the other. The first size was used to set `CPU` in fastslow_scale/plan/machine.py, the others were not.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastslow_scale.launch.local import rank_environment

STEPS = 5
SIZES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("10M, 4 x 256 tokens", {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8}, {}),
    ("10M, 8 x 256 tokens", {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8}, {"rows": 8}),
    ("4M, 8 x 256 tokens", {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12}, {"rows": 8}),
    (
        "38M, 2 x 512 tokens",
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
        {"tokens": 512, "rows": 2},
    ),
]


def config_of(model: dict[str, Any], sizes: dict[str, Any], variant: str) -> Any:
    from fastslow_scale.config import Config

    rows = sizes.get("rows", 4)
    heads = {"vocab_size": 8192, "num_attention_heads": 8, "variant": variant}
    train = {
        "seq_length": sizes.get("tokens", 256),
        "micro_batch_size": rows,
        "global_batch_size": rows,
        "max_steps": 1,
    }
    return Config.model_validate({"model": heads | model, "slow": {"num_layers": 2}, "train": train})


def measured(config: Any) -> float:
    """Median seconds of a step after two to warm up."""
    from benchmarks.memory import training_step
    from fastslow_scale.model.model import build_model
    from fastslow_scale.parallel.mesh import single_process_mesh
    from fastslow_scale.train.engine import Engine

    mesh = single_process_mesh()
    step = training_step(config, Engine(build_model(config, mesh), config, mesh))
    spent = []
    for _ in range(2 + STEPS):
        start = time.perf_counter()
        step()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


def main() -> None:
    import torch

    from fastslow_scale.parallel.hardware import NETWORK_GBITS
    from fastslow_scale.plan.machine import machine_for
    from fastslow_scale.plan.roofline import step_time
    from fastslow_scale.train.engine import BUCKET_ELEMENTS

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(f"load average before the start: {os.getloadavg()[0]:.1f}\n")
    print("| run | measured s | predicted s | predicted / measured |", "|---|---|---|---|", sep="\n")
    for name, model, sizes in SIZES:
        for variant in ("dense", "coupled"):
            config = config_of(model, sizes, variant)
            machine = machine_for(config, "cpu", 1, 1, NETWORK_GBITS)
            expected = step_time(config, machine, BUCKET_ELEMENTS).seconds
            took = measured(config)
            print(f"| {variant}, {name} | {took:.3f} | {expected:.3f} | {expected / took:.2f} |", flush=True)


if __name__ == "__main__":
    # glibc reads its settings when a process starts: the launcher's must be there before.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ.update(rank_environment(1))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
