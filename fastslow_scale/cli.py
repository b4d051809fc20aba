"""The `fastslow` command. Each command says what it takes with --help; a user's mistake is one line, exit status 2."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.arguments import finite, refuse_empty
from data_pipeline.cli import app as data_app
from data_pipeline.errors import UserError
from fastslow_scale.cli_arguments import ConfigPath, Overrides
from fastslow_scale.config_file import load_config
from fastslow_scale.errors import RunError
from fastslow_scale.launch.ending import exit_status
from fastslow_scale.parallel.hardware import NETWORK_GBITS
from fastslow_scale.study.cli import app as study_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pretrain, sample and study fast-slow language models.",
)
app.add_typer(data_app, name="data")
app.add_typer(study_app)


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start on this machine. Default: one tensor-parallel group.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="auto: the run folder's newest sound checkpoint; never; or a checkpoint's folder.")
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all ranks again, from the newest checkpoint, if one fails.")
    ] = 0,
) -> None:
    """Train a model; the same command goes on where an interrupted run stopped.

    Started under torchrun or srun it joins that job as one rank; alone it starts its own ranks. SIGTERM, SIGINT,
    SIGUSR1 and SIGUSR2 make all ranks save and end with exit status 75, "start me again".
    """
    from fastslow_scale.launch.job import job_environment, joined_job
    from fastslow_scale.launch.local import launch
    from fastslow_scale.launch.signals import goes_on
    from fastslow_scale.monitor.wandb_log import refuse_missing_wandb
    from fastslow_scale.train import worker
    from fastslow_scale.train.batch import open_data
    from fastslow_scale.train.run_folder import refuse_other_run

    given = overrides or []
    if joined_job():
        os.environ.update(job_environment())
        refuse_restarts(int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)), resume)
        raise typer.Exit(worker.run(config, given, resume))
    refuse_restarts(max_restarts, resume)
    tree = load_config(config, given)
    ranks = nproc if nproc is not None else tree.parallel.tensor_parallel_size
    tree.data_parallel_size(ranks)
    # The ranks check these too; here a mistake shows before any of them starts.
    refuse_other_run(tree)
    refuse_missing_wandb(tree)
    open_data(tree)
    arguments = [config, *given, "--resume", resume]
    raise typer.Exit(launch(ranks, "fastslow_scale.train.worker", arguments, max_restarts, goes_on(resume)))


def refuse_restarts(max_restarts: int, resume: str) -> None:
    """A restart with another --resume would begin where this start began, and lose what it saved."""
    if max_restarts and resume != "auto":
        raise UserError(f"--max-restarts goes on from the newest checkpoint: it needs --resume auto (got {resume})")


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, one of its checkpoints, or an export.")],
    prompt: Annotated[
        list[str], typer.Option(help="The text to go on from; several are generated together. Empty: a new document.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="0 takes the likeliest token each time.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that make up this share.")
    ] = 0.95,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from so many of the likeliest tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Go on past the context that the model was trained with.")
    ] = False,
    show_stats: Annotated[
        bool, typer.Option("--stats", help="Print the time of a token and the slow path's share of it, to stderr.")
    ] = False,
) -> None:
    """Sample text from a trained model, on one process whatever layout it was trained with."""
    from fastslow_scale.inference import generate as text
    from fastslow_scale.inference.load import load_model

    loaded = load_model(run)
    for note in loaded.notes:
        print(note, file=sys.stderr)
    sampling, stats = text.Sampling(temperature, top_p, seed, top_k), text.Stats.of(loaded.model)
    steps = text.generate(loaded, prompt, max_tokens, sampling, stop or [], beyond_context, stats)
    if len(prompt) == 1:
        for count, (piece,) in enumerate(steps):
            print(piece if count else prompt[0] + piece, end="", flush=True)
        print()
    else:
        grown = ["".join(pieces) for pieces in zip(*steps, strict=True)]
        print("\n\n".join(start + rest for start, rest in zip(prompt, grown, strict=True)))
    if show_stats:
        print("\n".join(stats.lines(len(prompt))), file=sys.stderr)


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, one of its checkpoints, or an export.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="Further files for --text: an unquoted glob.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Another data folder, or its URL; its validation split is read.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE...", help="Text files, each read whole as one document.")
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="The first so many of a data folder. Default: the run's validation.max_sequences."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="TASK,TASK,...", help="Tasks of lm-evaluation-harness instead of plain text.")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with tasks of your own, as the harness defines them.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Where the numbers go, too.")] = None,
) -> None:
    """Measure loss, perplexity and bits per byte on held-out text, by source and by position; or run tasks.

    Without --data and --text: on the validation split of the run's own data. docs/evaluation.md says what is counted.
    """
    from fastslow_scale.inference import evaluate_report as report
    from fastslow_scale.inference.evaluate import evaluate
    from fastslow_scale.inference.evaluation_data import rows_for
    from fastslow_scale.inference.load import load_model

    if more and not text:
        raise UserError(f"{more[0]}: text files are named with --text")
    texts = [*(text or []), *(more or [])]
    if output is not None:
        if output.resolve() in [Path(file).resolve() for file in texts]:
            raise UserError(f"--output {output} is one of the --text files")
        report.refuse_output(output)
    if task_path is not None and tasks is None:
        raise UserError("--task-path is for --tasks")
    if tasks is not None:
        if texts or data is not None or sequences is not None:
            raise UserError("--tasks bring their own data: --data, --text and --sequences do not go with them")
        return _evaluate_tasks(run, tasks, task_path, output)
    loaded = load_model(run)
    for note in loaded.notes:
        print(note, file=sys.stderr)
    rows = rows_for(loaded, data, texts, sequences)
    with report.progress(len(rows.source)) as on_score:
        found = evaluate(loaded, rows, on_score)
    print("\n".join(report.lines(found)))
    if output is not None:
        report.write(found, output)


def _evaluate_tasks(run: str, tasks: str, task_path: Path | None, output: Path | None) -> None:
    from fastslow_scale.inference import evaluate_tasks as harness

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError(f"--tasks must be names with commas between them (got {tasks!r})")
    found = harness.evaluate_tasks(run, names, task_path)
    for note in found.notes:
        print(note, file=sys.stderr)
    print("\n".join(harness.lines(found)))
    if output is not None:
        harness.write(found, output)


@app.command()
def tensorboard(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of such, as of a study.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 6006,
) -> None:
    """Open TensorBoard on this machine only; `CUSTOM SCALARS` is the page to look at first."""
    from fastslow_scale.monitor.console import tensorboard_arguments

    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *tensorboard_arguments(runs, port)])


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder or one of its checkpoints.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A folder that does not exist yet, or is empty.")],
) -> None:
    """Write a trained model as a Hugging Face folder, whatever layout it was trained with.

    A dense model becomes a plain Llama (a Mistral, if it has a window); the others carry their own code, for
    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True). docs/export.md describes the files.
    """
    from fastslow_scale.inference.export import export as write

    written = write(run, output)
    for note in written.notes:
        print(note, file=sys.stderr)
    print(f"{output}: {written.architecture}, {written.parameters:,} parameters, from {written.checkpoint}")


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="LLAMA_DIR", help="A Hugging Face folder: config.json and safetensors.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A folder that does not exist yet, or is empty.")],
    overrides: Overrides = None,
) -> None:
    """Start a coupled model from a dense Llama: its gates are zero, so that it begins as the same function.

    DIR holds the weights, for train.init_from, and a config.yaml to train with. The tokenizer is that of data.path, if
    that is given, or else the tokenizer.model in LLAMA_DIR.
    """
    from fastslow_scale.inference.import_llama import import_llama

    made = import_llama(source, output, overrides or [])
    for note in made.notes:
        print(note, file=sys.stderr)
    data = "" if made.config.data.path or made.config.data.sources else " data.path=DATA"
    print(f"{output}: the weights of {source}, {made.parameters:,} parameters with the vocabulary's padding")
    print(f"fastslow train {made.path}{data}")


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="The run that is to start; none: only this machine.")
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what takes seconds: torch is not imported.")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="How many ranks the run is to have.")] = None,
) -> None:
    """Say what is installed and found here, and what would stop a run; exit status 1 if something would.

    Under srun, one process a node, all report to the first node, which compares them and names each bad one.
    """
    from fastslow_scale.launch.doctor import examine
    from fastslow_scale.launch.job import job_environment, joined_job, step_hosts
    from fastslow_scale.launch.roll_call import collect, judge, report_to
    from fastslow_scale.launch.signals import start_again_on_signal

    start_again_on_signal()
    joined = joined_job()
    if joined:
        os.environ.update(job_environment())
    tree = load_config(config, overrides or []) if config else None
    report = examine(tree, ranks, quick)
    reports = [report]
    if joined:
        first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] != "0":
            if not report_to((first, port), report):
                raise RunError(f"{report.host} cannot reach {first} port {port}")
            return
        reports = collect(report, step_hosts(), port, tree.train.run_dir if tree else None)
    for line in [*report.versions, *(entry.line() for entry in reports)]:
        print(line)
    problems = judge(reports)
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print("nothing found that would stop a run")


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks of each; for cpu, processes.")] = 8,
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200, b200 or another of parallel/hardware.py; cpu: this machine.")
    ] = "h100",
    network_gbits: Annotated[
        float,
        typer.Option(
            min=0.001, callback=finite, help="Of one node's network, in one direction. Default: 8 adapters of 400 Gb/s."
        ),
    ] = NETWORK_GBITS,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where the numbers go, too.")] = None,
) -> None:
    """Predict memory, messages, speed and cost of a run, and the fastest layout that fits; nothing is run.

    docs/scaling.md says what the numbers rest on.
    """
    import json

    from fastslow_scale.plan.machine import machine_for
    from fastslow_scale.plan.report import as_object, lines, make_plan
    from fastslow_scale.train.engine import BUCKET_ELEMENTS

    tree = load_config(config, overrides or [])
    found = make_plan(tree, machine_for(tree, gpu, nodes, gpus_per_node, network_gbits), BUCKET_ELEMENTS)
    print("\n".join(lines(found)))
    if output is not None:
        try:
            output.write_text(json.dumps(as_object(found), indent=1), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {output} cannot be written: {error.strerror}") from None


def main() -> None:
    """Run the command line."""
    # Megatron and torch warn, whenever they are imported, about choices that are made on purpose.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", module="torch")
    sys.exit(exit_status(_run))


def _run() -> int | None:
    refuse_empty(sys.argv[1:])
    status: int | None = app(standalone_mode=False)
    return status


if __name__ == "__main__":
    main()
