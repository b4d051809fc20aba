"""Predicted and measured seconds of one step on this machine's CPU, one rank, at a few sizes.

    .venv/bin/python benchmarks/plan_time.py [--rounds N] [--fit]

All sizes take turns. Before each step the plan measures this machine's peaks anew: what slows the machine for a while
slows both. A ratio is the median over the rounds. Only the first size, dense, was used to set `CPU` in
fastslow_scale/plan/machine.py: the last line says which shares of the peaks it reached here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.interleave import processor, quartiles
from fastslow_scale.launch.local import rank_environment

WARMUP_STEPS = 2
PRODUCTS = ("aten::mm", "aten::addmm_", "aten::addmm", "aten::bmm")
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


def step_of(config: Any, mesh: Any) -> Callable[[], float]:
    """One step on random tokens, warmed up; it gives its seconds."""
    from benchmarks.memory import training_step
    from fastslow_scale.model.model import build_model
    from fastslow_scale.train.engine import Engine

    step = training_step(config, Engine(build_model(config, mesh), config, mesh))

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for _ in range(WARMUP_STEPS):
        timed()
    return timed


def seconds_of_kinds(step: Callable[[], float]) -> dict[str, float]:
    """Where the seconds of one step go: matrix products, attention, all else by the memory that it moves."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        whole = step()
    spent = {event.key: event.self_cpu_time_total * 1e-6 for event in profiler.key_averages()}
    products = sum(spent.get(name, 0.0) for name in PRODUCTS)
    attention = sum(seconds for name, seconds in spent.items() if "scaled_dot_product" in name)
    return {"matmul": products, "attention": attention, "memory": whole - products - attention}


def shares_reached(expected: Any, machine: Any, spent: dict[str, float]) -> dict[str, float]:
    """The shares of the peaks with which the plan would have predicted these seconds, of a dense model."""
    products, attention = expected.parts["products of the fast path"], expected.parts["attention"]
    planned = {"matmul": products, "attention": attention, "memory": expected.seconds - products - attention}
    return {kind: getattr(machine.efficiency, kind) * planned[kind] / spent[kind] for kind in spent}


def main() -> None:
    import torch

    from fastslow_scale.parallel.hardware import NETWORK_GBITS
    from fastslow_scale.parallel.mesh import single_process_mesh
    from fastslow_scale.plan.machine import machine_for
    from fastslow_scale.plan.roofline import step_time
    from fastslow_scale.train.engine import BUCKET_ELEMENTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each size (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="only the first size: the shares that it reaches")
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    load = os.getloadavg()[0]
    configs = {
        f"{variant}, {name}": config_of(model, sizes, variant)
        for name, model, sizes in SIZES
        for variant in ("dense", "coupled")
    }
    if options.fit:
        configs = dict([next(iter(configs.items()))])
    mesh = single_process_mesh()
    steps = {name: step_of(config, mesh) for name, config in configs.items()}
    measured: dict[str, list[float]] = {name: [] for name in configs}
    predicted: dict[str, list[float]] = {name: [] for name in configs}
    reached: list[dict[str, float]] = []
    for _ in range(rounds):
        for number, (name, config) in enumerate(configs.items()):
            machine = machine_for(config, "cpu", 1, 1, NETWORK_GBITS)
            expected = step_time(config, machine, BUCKET_ELEMENTS)
            predicted[name].append(expected.seconds)
            measured[name].append(steps[name]())
            if number == 0:
                reached.append(shares_reached(expected, machine, seconds_of_kinds(steps[name])))
    print(
        f"{processor()}, {torch.get_num_threads()} threads, {rounds} rounds, load average before the start {load:.1f}\n"
    )
    print("| run | predicted / measured | quartiles | measured s | predicted s |", "|---|---|---|---|---|", sep="\n")
    for name in configs:
        low, middle, high = quartiles([a / b for a, b in zip(predicted[name], measured[name], strict=True)])
        both = f"{statistics.median(measured[name]):.3f} | {statistics.median(predicted[name]):.3f}"
        print(f"| {name} | {middle:.2f} | {low:.2f} - {high:.2f} | {both} |")
    shares = {kind: statistics.median(row[kind] for row in reached) for kind in reached[0]}
    first = next(iter(configs))
    print(f"\n{first}, reaches of the peaks: " + ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items()))


if __name__ == "__main__":
    # glibc reads its settings when a process starts: the launcher's must be there before.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ.update(rank_environment(1))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
