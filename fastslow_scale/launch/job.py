"""The job that torchrun or srun started, as one of its processes sees it. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from data_pipeline.errors import UserError

FIRST_RESERVED_STEP = 0xFFFFFFF0


def joined_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process already is one rank of a job that torchrun or srun started."""
    return _under_torchrun(environment) or _under_srun(environment)


def job_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of the job this process is a rank of.

    torchrun sets them itself; for a rank started by srun they follow from SLURM's own variables, but for a MASTER_ADDR
    and MASTER_PORT that are set already.
    """
    if _under_torchrun(environment):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        return {name: environment[name] for name in names if name in environment}
    # Below the ports that the system hands out by itself; steps of one job that run side by side get different ones.
    port = 10000 + (31 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % 20000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": _step_tasks(environment),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or step_hosts(environment)[0],
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def step_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The nodes of this srun step, in SLURM's order."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:  # inside a container, which has none of SLURM's commands
        hosts = _expanded(nodes)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"cannot tell the hosts of SLURM's node list {nodes}: {error}") from None
    if not hosts:
        raise UserError(f"SLURM's node list {nodes} names no host")
    return hosts


def _expanded(nodes: str) -> list[str]:
    """`gpu[07-08,11],login` -> gpu07, gpu08, gpu11, login. Names with several brackets are left to scontrol."""
    word = r"[^,\[\]]+(?:\[[\d,-]+\])?"
    if not re.fullmatch(rf"{word}(?:,{word})*", nodes):
        raise UserError(f"cannot tell the hosts of SLURM's node list {nodes} without scontrol")
    hosts = []
    for name, ranges in re.findall(r"([^,\[\]]+)(?:\[([\d,-]+)\])?", nodes):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else None
            hosts += [name] if numbers is None else [f"{name}{number:0{len(first)}d}" for number in numbers]
    return hosts


def _under_torchrun(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def _under_srun(environment: Mapping[str, str]) -> bool:
    # A batch script and the shell of salloc have SLURM_PROCID and SLURM_NTASKS too, but are no ranks: they have no step
    # id, or one of the highest, which SLURM keeps for its own steps.
    step = int(environment.get("SLURM_STEP_ID", FIRST_RESERVED_STEP))
    in_step = step < FIRST_RESERVED_STEP and "SLURM_PROCID" in environment
    return in_step and int(_step_tasks(environment)) > 1


def _step_tasks(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
