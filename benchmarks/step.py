"""What one optimizer step costs: our full path beside plain loops, all on this machine, in one run.

    .venv/bin/python benchmarks/step.py [--rounds N] [--tokens N] [--threads N] [--seconds N] [--profile]

Every variant lives in a process of its own, in the environment that the launcher gives its ranks, and they take turns
(benchmarks/interleave.py). A ratio is the median over the rounds of (step time of the variant / step time of the best
plain loop, same round). CPU ratio is the same for the CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.interleave import SEED, Built, Failed, Turn, Worker, paired, processor, take_turns
from fastslow_scale.launch.local import rank_environment

SEQ_LENGTH = 256
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    title: str
    loop: Literal["plain", "hugging_face", "engine"]
    model: Literal["dense", "coupled"] = "dense"
    zero_stage: int = 0
    malloc_settings: bool = True

    @property
    def is_plain(self) -> bool:
        return self.loop != "engine"


VARIANTS = [
    Variant("plain torch loop, our model", "plain"),
    Variant("Hugging Face Llama, plain loop", "hugging_face"),
    Variant("full path, ZeRO-0", "engine", zero_stage=0),
    Variant("full path, ZeRO-1", "engine", zero_stage=1),
    Variant("full path, ZeRO-1, coupled", "engine", "coupled", zero_stage=1),
    Variant("plain torch loop, default malloc", "plain", malloc_settings=False),
    Variant("full path, ZeRO-1, default malloc", "engine", zero_stage=1, malloc_settings=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="turns of every variant (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=300, help="no new round after these (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help=f"tokens of a step, a multiple of {SEQ_LENGTH}")
    parser.add_argument("--threads", type=int, default=None, help="of each process (default: what the launcher takes)")
    parser.add_argument("--profile", action="store_true", help="then profile plain torch and ZeRO-1")
    options = parser.parse_args()
    if options.tokens < SEQ_LENGTH or options.tokens % SEQ_LENGTH:
        parser.error(f"--tokens must be a multiple of {SEQ_LENGTH}")
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)

    load = os.getloadavg()[0]
    workers = [Worker(build, (variant, options.tokens), environment=environment_of(variant)) for variant in VARIANTS]
    try:
        for worker in workers:
            worker.wait_until_ready()
        found = []
        for turns in take_turns(workers, options.rounds, options.steps, options.seconds):
            if isinstance(turns, Failed):
                raise turns
            found.append(turns)
        print_table(workers, found, options, load)
        if options.profile:
            for number in (0, 3):
                print(f"\n{VARIANTS[number].title}:\n{workers[number].profile(options.steps)}")
    finally:
        for worker in workers:
            worker.end()


def print_table(workers: list[Worker], found: list[list[Turn]], options: argparse.Namespace, load: float) -> None:
    """`found`: of each worker the turns, one a round."""
    import torch

    medians = [statistics.median(turn.seconds for turn in turns) for turns in found]
    best = min((n for n, variant in enumerate(VARIANTS) if variant.is_plain), key=lambda n: medians[n])
    size = workers[0].about["parameters"] / 1e6
    print(f"{size:.1f}M parameters (dense), fp32, {options.tokens} tokens a step, TP=1, one rank,")
    print(f"{workers[0].threads} threads, {processor()}, torch {torch.__version__},")
    print(f"{len(found[0])} rounds of {options.steps} steps, load average before the start {load:.1f}\n")
    print("| step time / best plain loop | quartiles | CPU ratio | tokens/s | ms a step | peak MB | variant |")
    print("|---|---|---|---|---|---|---|")
    for variant, worker, turns, median in zip(VARIANTS, workers, found, medians, strict=True):
        low, middle, high = paired(turns, found[best], lambda turn: turn.seconds)
        cpu = paired(turns, found[best], lambda turn: turn.cpu_seconds)[1]
        speed = f"{options.tokens / median:.0f} | {median * 1e3:.0f} | {worker.memory().whole:.0f}"
        name = variant.title + (" (best plain)" if turns is found[best] else "")
        print(f"| {middle:.3f} | {low:.3f} - {high:.3f} | {cpu:.3f} | {speed} | {name} |")


def environment_of(variant: Variant) -> dict[str, str]:
    """What the launcher gives its ranks, with its malloc settings or without."""
    extra = rank_environment(1)
    if variant.malloc_settings:
        return extra
    return {name: value for name, value in extra.items() if not name.startswith("MALLOC_")}


def build(argument: tuple[Variant, int]) -> Built:
    """A variant at so many tokens a step."""
    import torch

    from benchmarks import loops

    variant, tokens = argument
    sequences = tokens // SEQ_LENGTH
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(0, MODEL["vocab_size"], (8, sequences, SEQ_LENGTH + 1), generator=generator)
    step, parameters = getattr(loops, variant.loop)(config_of(variant, sequences))
    return Built(step, rows, {"parameters": parameters})


def config_of(variant: Variant, sequences: int) -> Any:
    from fastslow_scale.config import Config

    return Config.model_validate(
        {
            "model": MODEL | {"variant": variant.model},
            "slow": {"pool_size": 8, "num_layers": 2},
            "parallel": {"zero_stage": variant.zero_stage},
            "train": {
                "seed": SEED,
                "seq_length": SEQ_LENGTH,
                "micro_batch_size": sequences,
                "global_batch_size": sequences,
                "max_steps": 100_000,
            },
        }
    )


if __name__ == "__main__":
    main()
