"""CPU time per token at growing lengths: a window with the slow path, beside full attention without it.

    .venv/bin/python benchmarks/window.py [--rounds N] [--window N] [--threads N]

The model is that of configs/tiny.yaml. A step is the forward and backward of 8192 tokens, as many sequences as they
make. All cells take turns in one process, in an order that moves on from round to round; a ratio is the median over the
rounds of the ratios within a round. CPU seconds of the process are taken, all threads together: other programs on the
machine disturb them less than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

warnings.simplefilter("ignore")

from fastslow_scale.config_file import load_config  # noqa: E402
from fastslow_scale.model.model import FastSlowModel, build_model  # noqa: E402
from fastslow_scale.parallel.mesh import single_process_mesh  # noqa: E402

TOKENS = 8192
LENGTHS = (1024, 2048, 4096, 8192)
BASE = 2048
ONE_RANK = ["parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false"]

Cell = tuple[str, int]


def build(overrides: list[str], length: int) -> FastSlowModel:
    config = load_config(str(ROOT / "configs" / "tiny.yaml"), [*ONE_RANK, f"train.seq_length={length}", *overrides])
    return build_model(config, single_process_mesh())


def step_seconds(model: FastSlowModel, length: int) -> float:
    """CPU seconds of a forward and backward."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, model.config.model.vocab_size, (TOKENS // length, length + 1), generator=generator)
    start = time.process_time()
    model(rows[:, :-1], rows[:, 1:]).backward()
    spent = time.process_time() - start
    model.zero_grad()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    kinds = {
        "window": ["model.variant=coupled", f"model.attention_window={options.window}"],
        "full": ["model.variant=dense"],
    }
    cells: dict[Cell, FastSlowModel] = {
        (kind, length): build(overrides, length) for kind, overrides in kinds.items() for length in LENGTHS
    }
    for (_, length), model in cells.items():
        step_seconds(model, length)
    spent: dict[Cell, list[float]] = {cell: [] for cell in cells}
    order = list(cells)
    for turn in range(options.rounds):
        first = turn % len(order)
        for cell in [*order[first:], *order[:first]]:
            spent[cell].append(step_seconds(cells[cell], cell[1]))

    def ratio(cell: Cell, base: Cell) -> str:
        found = [own / other for own, other in zip(spent[cell], spent[base], strict=True)]
        return f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f})"

    print(f"configs/tiny.yaml, {TOKENS} tokens a step, fp32, {options.threads} threads, {options.rounds} rounds,")
    print(f"load average before the start {load:.1f}\n")
    print(
        f"| T | window {options.window}, coupled: time per token / at T = {BASE} | full attention, dense: the same "
        "| window, coupled / full attention, dense | µs per token, window, coupled |"
    )
    print("|---|---|---|---|---|")
    for length in LENGTHS:
        window, full = ("window", length), ("full", length)
        each = statistics.median(spent[window]) / TOKENS * 1e6
        print(
            f"| {length} | {ratio(window, ('window', BASE))} | {ratio(full, ('full', BASE))} "
            f"| {ratio(window, full)} | {each:.0f} |"
        )


if __name__ == "__main__":
    main()
