"""CPU time of a training step with `train.compile` and without: configs/tiny.yaml on one rank, dense and coupled.

    .venv/bin/python benchmarks/compiled.py [--rounds N] [--threads N] [section.key=value ...]

A step is the forward and backward of one micro-batch. All take turns in one process; a ratio is the median over the
rounds of (CPU time with / CPU time without, same round), all threads together.
"""

from __future__ import annotations

import argparse
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
from fastslow_scale.model.compiled import compile_inner_parts  # noqa: E402
from fastslow_scale.model.model import FastSlowModel, build_model  # noqa: E402
from fastslow_scale.parallel.mesh import single_process_mesh  # noqa: E402

VARIANTS = ("dense", "coupled")
ONE_RANK = ["parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false"]


def step_seconds(model: FastSlowModel) -> tuple[float, float]:
    """CPU seconds of a forward and backward, and the summed loss."""
    train, vocab_size = model.config.train, model.config.model.vocab_size
    shape = (train.micro_batch_size, train.seq_length + 1)
    rows = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    spent = time.process_time() - start
    model.zero_grad()
    return spent, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    models, losses = {}, {}
    for variant in VARIANTS:
        for compiled in (False, True):
            overrides = [*ONE_RANK, f"model.variant={variant}", *options.overrides]
            model = build_model(load_config(str(ROOT / "configs" / "tiny.yaml"), overrides), single_process_mesh())
            if compiled:
                compile_inner_parts(model)
            start = time.process_time()
            losses[variant, compiled] = step_seconds(model)[1]
            if compiled:
                print(f"{variant}: {time.process_time() - start:.0f} s of CPU time for the first step")
            models[variant, compiled] = model
    spent: dict[tuple[str, bool], list[float]] = {key: [] for key in models}
    for _ in range(options.rounds):
        for key, model in models.items():
            spent[key].append(step_seconds(model)[0])
    print(f"\n{options.threads} threads, {options.rounds} rounds\n")
    print("| | compiled / eager, CPU time | least and most | eager, ms | difference of the losses / loss |")
    print("|---|---|---|---|---|")
    for variant in VARIANTS:
        eager, compiled = spent[variant, False], spent[variant, True]
        ratios = [own / base for own, base in zip(compiled, eager, strict=True)]
        apart = abs(losses[variant, True] - losses[variant, False]) / losses[variant, False]
        print(
            f"| {variant} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} "
            f"| {statistics.median(eager) * 1e3:.0f} | {apart:.1e} |"
        )


if __name__ == "__main__":
    main()
