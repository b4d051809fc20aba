"""One rank of a training job: `python -m fastslow_scale.train.worker CONFIG [section.key=value ...] [--resume R]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence

from fastslow_scale.config_file import load_config
from fastslow_scale.errors import RunError
from fastslow_scale.launch.signals import EXIT_START_AGAIN, start_again_on_signal


def run(config_path: str, overrides: Sequence[str], resume: str) -> int:
    """Train as one rank of the job that the environment describes (torchrun's variables), or alone.

    Returns:
        The status to exit with: 0, or EXIT_START_AGAIN after a signal.

    Raises:
        UserError: something the user can mend; every rank that meets it raises it.
        RunError: another rank does not answer.
    """
    start_again_on_signal()
    config = load_config(config_path, overrides)
    # Megatron and torch warn, once per rank, about choices that are made on purpose.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", module="torch")
    import torch.distributed as dist

    from fastslow_scale.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from fastslow_scale.train.heartbeat import Heartbeat, describe
    from fastslow_scale.train.loop import train

    start_process_group(config.train.timeout_seconds)
    world_size = dist.get_world_size()
    config.data_parallel_size(world_size)
    command = shlex.join(["fastslow", "train", config_path, *overrides])
    heartbeat = Heartbeat(dist.get_rank(), world_size, config.train.timeout_seconds) if world_size > 1 else None
    try:
        mesh = build_mesh(config.parallel.tensor_parallel_size, config.train.timeout_seconds)
        finished = train(config, mesh, resume, command, heartbeat)
    except RuntimeError as error:
        # A collective failed, or this rank's own code did: a rank that is stuck or gone is the likelier cause.
        silent = heartbeat.silent_ranks() if heartbeat else []
        if silent:
            raise RunError(describe(silent)) from error
        raise
    if heartbeat:
        heartbeat.close()
    stop_process_group()
    return 0 if finished else EXIT_START_AGAIN


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="fastslow_scale.train.worker")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", default="auto")
    options = parser.parse_args(arguments)
    sys.exit(run(options.config, options.overrides, options.resume))


if __name__ == "__main__":
    main(sys.argv[1:])
