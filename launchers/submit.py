"""Train on a SLURM cluster, or try the same job here first.

    python launchers/submit.py --nodes 8 [--config configs/1b.yaml] [--dry-run] [section.key=value ...]

Everything is checked before anything is queued. docs/clusters.md tells the whole way.
"""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from data_pipeline.arguments import refuse_empty
from fastslow_scale.launch.ending import exit_status


class Cluster(StrEnum):
    slurm = "slurm"
    local = "local"
    debug = "debug"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def submit(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    config: Annotated[str, typer.Option(help="The run.")] = "configs/1b.yaml",
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="Also the ranks of a node; 0: one rank on CPUs.")] = 8,
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores of each rank.")] = 8,
    mem: Annotated[str, typer.Option(help="Memory of a node; 0: all of it.")] = "0",
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    time: Annotated[
        str, typer.Option(help="Of one start: the job queues itself again until the run is done.")
    ] = "24:00:00",
    save_seconds: Annotated[int, typer.Option(min=1, help="The ranks are told to save so long before the end.")] = 120,
    constraint: str | None = None,
    exclude: Annotated[str | None, typer.Option(help="Nodes to leave out.")] = None,
    name: Annotated[str, typer.Option(help="Of the job.")] = "fastslow",
    dependency: Annotated[str | None, typer.Option(help="In SLURM's words, such as afterok:123.")] = None,
    chain: Annotated[
        int, typer.Option(min=1, help="So many jobs after each other, none of which queues itself again.")
    ] = 1,
    cluster: Annotated[
        Cluster, typer.Option(help="local: the same ranks on this machine. debug: one rank in this process, with pdb.")
    ] = Cluster.slurm,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the sbatch file, queue nothing.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
) -> int:
    """Queue a training job."""
    from fastslow_scale.launch import submit as jobs

    request = jobs.Request(
        config=config,
        overrides=tuple(overrides or ()),
        nodes=1 if cluster is Cluster.debug else nodes,
        gpus_per_node=1 if cluster is Cluster.debug else gpus_per_node,
        cpus_per_task=cpus_per_task,
        time=time,
        save_seconds=save_seconds,
        name=name,
        mem=mem,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        exclude=exclude,
        dependency=dependency,
        chain=chain,
    )
    plan = jobs.make_plan(request)
    executor = None
    if cluster is Cluster.slurm:
        jobs.check_cluster(plan)
        executor = jobs.make_executor(plan)
        jobs.refuse_by_slurm(plan, jobs.sbatch_text(executor))
    jobs.check_inputs(plan)
    for line in plan.lines():
        print(line)
    for line in plan.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if dry_run:
        print(*(["", jobs.sbatch_text(executor)] if executor else []), sep="\n")
        return 0
    if executor is None:
        return run_here(plan, cluster)
    queued = jobs.queue(plan, executor)
    run_dir = plan.config.train.run_dir
    for job in queued:
        print(f"job {job}, log {jobs.log_of(plan, job)}")
    print(f"curves: tensorboard --logdir {run_dir / 'tb'}", flush=True)
    if watch:
        from fastslow_scale.launch.watch import Watch

        return [Watch(job, run_dir, plan.config.train.num_steps).follow() for job in queued][-1]
    return 0


def run_here(plan, cluster: Cluster) -> int:
    """The ranks of the plan on this machine, in the foreground."""
    request = plan.request
    if cluster is Cluster.local:
        from fastslow_scale.launch.local import launch

        return launch(plan.world_size, "fastslow_scale.train.worker", [request.config, *request.overrides])
    import submitit

    from fastslow_scale.launch.submit import TrainingJob

    job = TrainingJob(request.config, request.overrides)
    submitit.AutoExecutor(plan.folder, cluster="debug").submit(job).result()
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: refuse_empty(sys.argv[1:]) or app(standalone_mode=False)))
