"""The commands that ask the question: `fastslow ablate`, `scaling`, `diagnose` and `theory`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.errors import UserError
from fastslow_scale.cli_arguments import ConfigPath, Overrides
from fastslow_scale.launch.signals import EXIT_START_AGAIN

app = typer.Typer()


@app.command()
def theory(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where report.md, report.json and the figures go.")
    ] = Path("runs/theory"),
    seed: Annotated[int, typer.Option(min=0, help="Other generators, other networks.")] = 0,
) -> None:
    """Check the linear theory behind the model by numbers; exit status 1 if a check fails. About a minute.

    Stiff solutions against the slow manifold, the stationary distribution three ways, phi learned without targets, and
    what breaks. docs/theory.md explains it.
    """
    from rich.console import Console

    from fastslow_scale.study import theory_report
    from fastslow_scale.study.theory import study_theory

    theory_report.prepare_folder(output)
    console = Console()
    with console.status("") as status:
        found = study_theory(seed, status.update)
    theory_report.print_claims(found.claims, console)
    for path in theory_report.write_report(found, output):
        print(path)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def ablate(
    config: ConfigPath,
    overrides: Overrides = None,
    variants: Annotated[
        str,
        typer.Option(
            help="Of dense, frozen, frozen_slow, coupled, shuffled, dense_matched_params and dense_matched_flops."
        ),
    ] = "dense,frozen,coupled",
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME=VARIANT KEY=VALUE ...'", help="A further arm: a variant with changed keys."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Paired runs of each arm.")] = 5,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each run. Default: the config's.")] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Runs and report; the same command goes on there.")
    ] = Path("runs/study"),
    baseline: Annotated[
        str | None, typer.Option(help="The arm that all are compared with. Default: the first.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side. Default: as many as have cores.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each run. Default: one tensor-parallel group.")
    ] = None,
    orders: Annotated[
        int, typer.Option(min=0, help="Further runs of the baseline's first seed, each with another order of the data.")
    ] = 0,
    lr_sweep: Annotated[
        str, typer.Option(metavar="LR,LR,...", help="Try these on another seed; each arm then has its own best.")
    ] = "",
    arguments_of: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Only print the arguments of run K for `fastslow train`, one a line."),
    ] = None,
) -> None:
    """Compare variants by paired runs, and say with what certainty they differ.

    Runs of one seed share fast weights and batches. Each run is resumed on its own; a study whose runs are all
    finished, for instance by a job array, is only reported. docs/ablation.md explains the report.
    """
    import shlex

    from fastslow_scale.study.planning import plan_study

    if arguments_of is not None and lr_sweep:
        raise UserError("--arguments-of goes without --lr-sweep: the runs' rates are known when the sweep has ended")
    study = plan_study(config, overrides or [], variants, arm or [], seeds, tokens, output, baseline, orders, lr_sweep)
    if arguments_of is not None:
        runs = study.runs()
        if arguments_of >= len(runs):
            raise UserError(f"--arguments-of must be less than the study's {len(runs)} runs (got {arguments_of})")
        print("\n".join([runs[arguments_of].config_path, *runs[arguments_of].overrides]))
        return
    from rich.console import Console

    from fastslow_scale.study.command import run_study

    command = shlex.join(["fastslow", *sys.argv[1:]])
    if not run_study(study, jobs, nproc, Console(), command):
        print(f"stopped; the same command goes on from here (exit status {EXIT_START_AGAIN})", file=sys.stderr)
        raise typer.Exit(EXIT_START_AGAIN)


@app.command()
def scaling(
    studies: Annotated[list[Path], typer.Argument(metavar="STUDY...", help="Folders that `fastslow ablate` reported.")],
    variant: Annotated[str, typer.Option(help="The arm in question.")] = "coupled",
    baseline: Annotated[str, typer.Option(help="The arm it is compared with.")] = "dense",
) -> None:
    """Fit the paired differences of several studies against tokens and model size: at what scale does it help?"""
    from fastslow_scale.study.scaling import fit, read_points

    points = read_points(studies, variant, baseline)
    found = fit(points)
    print(f"{variant} - {baseline}, nats of validation loss, negative: {variant} is better")
    for term in found.terms:
        low, high = term.interval_95
        print(f"{term.name:33} {term.value:+.5f}   95% interval {low:+.5f} to {high:+.5f}")
    print(f"{'noise of one paired difference':33} {found.noise:.5f}    ({len(points)} differences)")
    tokens, size = max(point.tokens for point in points), max(point.parameters for point in points)
    value, (low, high) = found.predict(10 * tokens, 10 * size)
    print(
        f"extrapolated to {10 * tokens:,} tokens and {10 * size:,} parameters: {value:+.5f}, "
        f"95% interval {low:+.5f} to {high:+.5f}"
    )


@app.command()
def diagnose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder or one of its checkpoints.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where report and figures go. Default: RUN/diagnosis.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=4, help="Held-out sequences to measure on.")] = 64,
) -> None:
    """Measure what a trained slow path does on held-out text: is the gate open, is y slow, how near is x to phi(y)?"""
    from rich.console import Console

    from fastslow_scale.study.diagnose import diagnose as examine
    from fastslow_scale.study.diagnose_report import print_diagnosis, write_diagnosis
    from fastslow_scale.study.theory_report import prepare_folder

    console = Console()
    with console.status("measuring"):
        found = examine(run, sequences)
    for note in found.notes:
        print(note, file=sys.stderr)
    if output is None:
        output = (
            found.checkpoint.parent.parent if found.checkpoint.parent.name == "checkpoints" else found.checkpoint
        ) / "diagnosis"
    prepare_folder(output)
    print_diagnosis(found, console)
    for path in write_diagnosis(found, output):
        print(path)
