"""One rank and two, data parallel, with as many tokens for each: what share of twice the speed do two reach?

    .venv/bin/python benchmarks/scaling_dp.py [--config configs/tiny.yaml] [--rounds 5] [--steps 40] [--output DIR]

Both are runs of `fastslow train`, in turns, with one thread a rank; the order changes from round to round. The share of
the ideal is tokens a second of two ranks / (2 x tokens a second of one rank), from the same round, each the median of
the run's logged steps without the first ones. Ranks of one machine share its memory and caches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.interleave import processor, quartiles
from fastslow_scale.config_file import load_config
from fastslow_scale.monitor.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
LOG_EVERY = 2
WARMUP = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of the larger run (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where the runs go (default: a folder that vanishes)")
    options = parser.parse_args()
    if options.steps < WARMUP + 5 * LOG_EVERY:
        parser.error(f"--steps must be at least {WARMUP + 5 * LOG_EVERY}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = options.output or Path(name)
        found: dict[int, list[dict[str, float]]] = {1: [], options.ranks: []}
        for turn in range(options.rounds):
            for ranks in [1, options.ranks] if turn % 2 == 0 else [options.ranks, 1]:
                found[ranks].append(run(options, ranks, folder / f"{turn}_{ranks}"))
    print_table(found, options, load)


def run(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, float]:
    """Train, and give the medians of what its steps logged."""
    shutil.rmtree(folder, ignore_errors=True)
    micro_batch = load_config(options.config).train.micro_batch_size
    keys = {
        "parallel.tensor_parallel_size": 1,
        "parallel.sequence_parallel": "false",
        "train.global_batch_size": micro_batch * ranks,
        "train.max_steps": options.steps,
        "train.run_dir": folder,
        "train.sanity_every": 0,
        "monitor.log_every": LOG_EVERY,
        "validation.every": 0,
        "validation.max_sequences": micro_batch * ranks,
        "checkpoint.every": 0,
    }
    command = ["train", options.config, *(f"{key}={value}" for key, value in keys.items()), "--nproc", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    full = [sys.executable, "-m", "fastslow_scale.cli", *command]
    done = subprocess.run(full, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(full)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    logged = [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r and r["step"] > WARMUP]
    parts = ("step_seconds", "forward_seconds", "backward_seconds", "communication_seconds", "optimizer_seconds")
    return {part: statistics.median(record[part] for record in logged) for part in (*parts, "tokens_per_second")}


def print_table(found: dict[int, list[dict[str, float]]], options: argparse.Namespace, load: float) -> None:
    many = options.ranks
    shares = [
        two["tokens_per_second"] / (many * one["tokens_per_second"])
        for one, two in zip(found[1], found[many], strict=True)
    ]
    low, middle, high = quartiles(shares)
    print(f"{options.config}, one thread a rank, {processor()},")
    print(f"{options.rounds} rounds of {options.steps} steps, load average before the start {load:.1f}\n")
    print(f"{many} ranks reach {middle:.3f} of {many} times one rank's speed (quartiles {low:.3f} - {high:.3f})\n")
    print("| milliseconds a step | step | forward | backward | communication | optimizer | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for ranks, runs in found.items():
        cells = [f"{ranks} rank" + ("s" if ranks > 1 else "")]
        for part in ("step", "forward", "backward", "communication", "optimizer"):
            cells.append(f"{1e3 * statistics.median(run[f'{part}_seconds'] for run in runs):.0f}")
        cells.append(f"{statistics.median(run['tokens_per_second'] for run in runs):.0f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
