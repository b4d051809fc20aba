"""One rank of a training job: `python -m fastslow_scale.train.worker CONFIG [section.key=value ...] [--resume R]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from data_pipeline.errors import UserError
from fastslow_scale.config import load_config


def main(arguments: Sequence[str]) -> int:
    """Join the job and train. Returns the exit status: 0, or 2 after one line about the user's mistake."""
    parser = argparse.ArgumentParser(prog="fastslow_scale.train.worker")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", default="auto")
    options = parser.parse_args(arguments)
    try:
        run(options.config, options.overrides, options.resume)
    except UserError as error:
        if first_to_fail():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def run(config_path: str, overrides: Sequence[str], resume: str) -> None:
    """Train as one rank of the job that the environment describes (torchrun's variables), or alone."""
    config = load_config(config_path, overrides)
    # Gloo and megatron warn, once per rank, about choices that are made on purpose.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", module="torch.distributed")
    from fastslow_scale.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from fastslow_scale.train.loop import train

    start_process_group(config.train.timeout_seconds)
    config.data_parallel_size(dist.get_world_size())
    mesh = build_mesh(config.parallel.tensor_parallel_size)
    command = shlex.join(["fastslow", "train", config_path, *overrides])
    train(config, mesh, resume, command)
    stop_process_group()


def first_to_fail() -> bool:
    """Whether this rank is the first of the job to report a mistake; ranks that share one report it once."""
    if not dist.is_initialized():
        return True
    store = dist.distributed_c10d._get_default_store()
    return store.add("mistakes", 1) == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
