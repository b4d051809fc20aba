"""One rank of a training job: `python -m fastslow_scale.train.worker CONFIG [section.key=value ...] [--resume R]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence

from fastslow_scale.config import load_config


def run(config_path: str, overrides: Sequence[str], resume: str) -> None:
    """Train as one rank of the job that the environment describes (torchrun's variables), or alone.

    Raises:
        UserError: something the user can mend; every rank that meets it raises it.
    """
    config = load_config(config_path, overrides)
    # Megatron and torch warn, once per rank, about choices that are made on purpose.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", module="torch")
    import torch.distributed as dist

    from fastslow_scale.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from fastslow_scale.train.loop import train

    start_process_group(config.train.timeout_seconds)
    config.data_parallel_size(dist.get_world_size())
    command = shlex.join(["fastslow", "train", config_path, *overrides])
    train(config, build_mesh(config.parallel.tensor_parallel_size), resume, command)
    stop_process_group()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="fastslow_scale.train.worker")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", default="auto")
    options = parser.parse_args(arguments)
    run(options.config, options.overrides, options.resume)


if __name__ == "__main__":
    main(sys.argv[1:])
