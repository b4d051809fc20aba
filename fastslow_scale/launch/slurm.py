"""Questions to SLURM, by the commands that every cluster has: sinfo, scontrol, sbatch. None needs accounting."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError

SECONDS = 30.0


class NoAnswer(Exception):
    """The controller cannot be reached now."""


@dataclass(frozen=True)
class Partition:
    """What its largest node has, how many nodes there are, and the longest a job may take (None: no limit)."""

    name: str
    is_default: bool
    nodes: int
    gpus: int
    minutes: int | None


@dataclass(frozen=True)
class JobState:
    """A job as `scontrol show job` tells it."""

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str
    log: Path

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


ENDED = frozenset("COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED".split())


def refuse_without_slurm() -> None:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        raise UserError("there is no SLURM on this machine (no sbatch): log in to the cluster, or take --cluster local")


def partitions() -> dict[str, Partition]:
    """All partitions by name."""
    found: dict[str, Partition] = {}
    for line in _ask("sinfo", "-h", "-o", "%P|%D|%G|%l").splitlines():
        name, nodes, gres, limit = line.split("|")
        own = Partition(name.rstrip("*"), name.endswith("*"), int(nodes), gpus_of(gres), minutes_of(limit))
        other = found.get(own.name)
        if other is not None:  # one line for each kind of node or state
            own = Partition(own.name, own.is_default, own.nodes + other.nodes, max(own.gpus, other.gpus), own.minutes)
        found[own.name] = own
    return found


def gpus_of(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nvme:1` -> 8."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def minutes_of(limit: str) -> int | None:
    """Whole minutes, rounded up, of a time as SLURM writes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, infinite."""
    if limit.lower() in ("infinite", "unlimited", "n/a"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit.strip())
    if not found:
        raise UserError(f"--time {limit} is no time that SLURM knows: minutes, hours:minutes:seconds, days-hours")
    days, *parts = (None if part is None else int(part) for part in found.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((days or 0) * 24 + hours) * 60 + minutes + (seconds > 0)


def refuse_by_sbatch(script: Path) -> None:
    """Have SLURM judge a script without queueing it."""
    done = _run("sbatch", "--test-only", str(script))
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise UserError(f"SLURM refuses the job: {said[-1].removeprefix('sbatch: error: ')}")


def job_state(job: str) -> JobState | None:
    """None: SLURM does not know such a job (any more).

    Raises:
        NoAnswer: the controller cannot be reached.
    """
    try:
        done = _run("scontrol", "show", "job", "--oneliner", job)
    except UserError as error:
        raise NoAnswer(str(error)) from None
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise NoAnswer(done.stderr.strip())
    fields = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
    return JobState(
        state=fields["JobState"],
        reason=fields["Reason"],
        nodes=fields.get("NodeList", ""),
        restarts=int(fields["Restarts"]),
        exit_code=fields["ExitCode"],
        log=Path(fields["StdOut"]),
    )


def _ask(*command: str) -> str:
    done = _run(*command)
    if done.returncode:
        raise UserError(f"SLURM does not answer: {done.stderr.strip().splitlines()[-1] if done.stderr else command[0]}")
    return done.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"SLURM does not answer: {command[0]} took more than {SECONDS:.0f} s") from None
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None
