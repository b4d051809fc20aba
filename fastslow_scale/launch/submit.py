"""A training job for SLURM, by submitit: planned and checked whole before anything is queued."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably
from fastslow_scale.config import Config
from fastslow_scale.config_file import load_config
from fastslow_scale.launch.ending import exit_status
from fastslow_scale.launch.job import job_environment, joined_job
from fastslow_scale.launch.slurm import minutes_of, partitions, refuse_by_sbatch, refuse_without_slurm
from fastslow_scale.versions import versions

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
FOLDER = "slurm"
"""Within the run folder: what was submitted, and the logs of the ranks."""


@dataclass(frozen=True)
class Request:
    """What a user asks for, in SLURM's words."""

    config: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    cpus_per_task: int = 8
    time: str = "24:00:00"
    save_seconds: int = 120
    name: str = "fastslow"
    mem: str = "0"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    chain: int = 1

    @property
    def tasks_per_node(self) -> int:
        """One per GPU; nodes without GPUs get one rank."""
        return max(1, self.gpus_per_node)


@dataclass(frozen=True)
class Plan:
    """What the job will be, as far as it can be said beforehand."""

    request: Request
    config: Config
    data_parallel_size: int
    warnings: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.request.nodes * self.request.tasks_per_node

    @property
    def folder(self) -> Path:
        return (self.config.train.run_dir / FOLDER).absolute()

    @property
    def snapshot(self) -> Path:
        """Where the job finds its config. Named by its content: jobs queued with another one keep theirs."""
        name = hashlib.sha256(self.config.to_yaml().encode()).hexdigest()[:8]
        return self.folder / f"config-{name}.yaml"

    def lines(self) -> list[str]:
        request, train = self.request, self.config.train
        accumulation = self.config.gradient_accumulation_steps(self.data_parallel_size)
        tokens = train.num_steps * train.tokens_per_step
        return [
            f"ranks         {self.world_size} = {request.nodes} nodes x {request.tasks_per_node}",
            f"layout        tensor parallel {self.config.parallel.tensor_parallel_size} x data parallel "
            f"{self.data_parallel_size}, ZeRO-{self.config.parallel.zero_stage}, {train.dtype}",
            f"global batch  {train.global_batch_size} sequences = {self.data_parallel_size} ranks x "
            f"{train.micro_batch_size} x {accumulation} micro-batches; {train.tokens_per_step:,} tokens",
            f"run           {train.num_steps:,} steps, {tokens:,} tokens",
            f"model         {self.config.model.variant}, "
            f"exchanges after layers {', '.join(map(str, self.config.slow.exchange_after))}",
            f"run folder    {train.run_dir}",
        ]


class TrainingJob(Checkpointable):
    """One rank of the run in a config file; submitit calls it in every task.

    The ranks themselves save at a signal and end with status 75; the job's script then queues the job again. Before
    training takes the signals over, submitit's own handler does the same, for which this is Checkpointable.
    """

    def __init__(self, config: str, overrides: tuple[str, ...] = ()):
        self.config, self.overrides = config, overrides

    def __call__(self) -> None:
        from fastslow_scale.train import worker

        if joined_job():
            os.environ.update(job_environment())
        status = exit_status(lambda: worker.run(self.config, self.overrides, "auto"))
        if status:
            sys.exit(status)


def make_plan(request: Request) -> Plan:
    """Load the config and fit it to the ranks.

    Raises:
        UserError: naming the key.
    """
    config = load_config(request.config, request.overrides)
    plan = Plan(request, config, config.data_parallel_size(request.nodes * request.tasks_per_node))
    tensor_parallel = config.parallel.tensor_parallel_size
    if request.tasks_per_node % tensor_parallel:
        plan.warnings.append(
            f"tensor-parallel groups of {tensor_parallel} do not fit into nodes of {request.tasks_per_node} ranks: "
            f"they will talk over the network"
        )
    return plan


def check_inputs(plan: Plan) -> None:
    """Check what the run reads and where it writes, as seen from here.

    Raises:
        UserError: naming the file or the folder.
    """
    from fastslow_scale.train.batch import open_data
    from fastslow_scale.train.run_folder import refuse_other_run

    refuse_other_run(plan.config)
    open_data(plan.config)


def check_cluster(plan: Plan) -> None:
    """Check what only SLURM knows; the rest is `refuse_by_sbatch`'s. Adds to the plan's warnings.

    Raises:
        UserError: no SLURM here, no such partition, or no node with so many GPUs.
    """
    request = plan.request
    refuse_without_slurm()
    known = partitions()
    name = request.partition or next((one.name for one in known.values() if one.is_default), None)
    if name is None:
        raise UserError(f"this cluster has no default partition: take --partition, one of {', '.join(known)}")
    if name not in known:
        raise UserError(f"--partition {name} does not exist here (there are: {', '.join(known)})")
    partition = known[name]
    if request.gpus_per_node > partition.gpus:
        raise UserError(
            f"--gpus-per-node {request.gpus_per_node}: the nodes of partition {name} have at most {partition.gpus}"
        )
    if request.nodes > partition.nodes:
        plan.warnings.append(
            f"partition {name} has {partition.nodes} nodes: a job of {request.nodes} waits until it has more"
        )
    minutes = minutes_of(request.time)
    if partition.minutes is not None and (minutes is None or minutes > partition.minutes):
        plan.warnings.append(
            f"partition {name} allows {partition.minutes} minutes: a job of --time {request.time} waits"
        )


def make_executor(plan: Plan) -> Any:
    """submitit's executor for this plan. Its parameters are the job's script."""
    request, folder, config = plan.request, plan.folder, plan.snapshot
    python = shlex.quote(sys.executable)
    minutes = minutes_of(request.time)
    if not minutes:
        raise UserError(f"--time must be a limited time of at least a minute (got {request.time})")
    executor = submitit.SlurmExecutor(
        folder=folder, python=f'{shlex.quote(str(SCRIPTS / "rank.sh"))} "$start_again" {python}'
    )
    chained = request.chain > 1
    executor.update_parameters(
        job_name=request.name,
        nodes=request.nodes,
        ntasks_per_node=request.tasks_per_node,
        cpus_per_task=request.cpus_per_task,
        time=minutes,
        signal_delay_s=request.save_seconds,
        mem=request.mem,
        partition=request.partition,
        account=request.account,
        qos=request.qos,
        constraint=request.constraint,
        exclude=request.exclude,
        dependency=request.dependency,
        gpus_per_node=request.gpus_per_node or None,
        wckey=None,  # submitit sets one that clusters with keys of their own refuse
        stderr_to_stdout=True,
        additional_parameters={"requeue": True, "kill-on-invalid-dep": "yes"},
        srun_args=[
            "--open-mode=append",
            "--kill-on-bad-exit=1",
            "--wait=300",
            f"--cpus-per-task={request.cpus_per_task}",
            "--gpu-bind=none",
        ],
        setup=[
            f"fastslow=({python} -m fastslow_scale.cli)",
            f"part_of_chain={'yes' if chained else 'no'}",
            f". {shlex.quote(str(SCRIPTS / 'job.sh'))}",
            "trap : TERM USR1 USR2",
            f"folder={shlex.quote(str(folder))}",
            'prepare_job "$folder/$SLURM_JOB_ID" "$folder/${SLURM_JOB_ID}_0_log.out"',
            f"preflight {shlex.quote(str(config))}",
        ],
        teardown=["finish $?"],
    )
    return executor


def sbatch_text(executor: Any) -> str:
    """Exactly what will be handed to sbatch."""
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def refuse_by_slurm(plan: Plan, text: str) -> None:
    """Ask sbatch whether it would take the script. Where the partition is too small, a warning has said so already."""
    if any("waits until" in line for line in plan.warnings):
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.sh"
        script.write_text(text, encoding="utf-8")
        refuse_by_sbatch(script)


def queue(plan: Plan, executor: Any) -> list[str]:
    """Write the snapshot and queue the job, or the chain of them; returns their ids.

    The jobs train from the snapshot: what happens to the config file, or is queued later, does not reach them.
    """
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        write_durably(plan.snapshot, plan.config.to_yaml().encode())
        write_durably(plan.folder / "versions", "".join(f"{line}\n" for line in versions()).encode())
    except OSError as error:
        raise UserError(f"train.run_dir {plan.config.train.run_dir} cannot be written: {error.strerror}") from None
    jobs: list[str] = []
    for _ in range(plan.request.chain):
        if jobs:
            executor.update_parameters(dependency=f"afterany:{jobs[-1]}")
        try:
            jobs.append(executor.submit(TrainingJob(str(plan.snapshot))).job_id)
        except submitit.core.utils.FailedJobError as error:
            raise UserError(f"SLURM refuses the job: {str(error).strip().splitlines()[-1]}") from None
    return jobs


def log_of(plan: Plan, job: str) -> Path:
    """Of the job's script and the first rank."""
    return plan.folder / f"{job}_0_log.out"
