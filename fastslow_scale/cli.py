"""The `fastslow` command. Each command says what it takes with --help; a user's mistake is one line, exit status 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import click
import typer

from data_pipeline.cli import app as data_app
from data_pipeline.errors import UserError
from fastslow_scale.config import load_config
from fastslow_scale.errors import RunError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pretrain, sample and study fast-slow language models.",
)
app.add_typer(data_app, name="data")

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/tiny.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the file's, such as optimizer.lr=1e-3."),
]


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
    from fastslow_scale.launch.local import job_environment, joined_job, launch
    from fastslow_scale.train import worker
    from fastslow_scale.train.batch import open_data
    from fastslow_scale.train.run_folder import refuse_other_run

    given = overrides or []
    if joined_job():
        os.environ.update(job_environment())
        raise typer.Exit(worker.run(config, given, resume))
    if max_restarts and resume != "auto":
        raise UserError(f"--max-restarts goes on from the newest checkpoint: it needs --resume auto (got {resume})")
    tree = load_config(config, given)
    ranks = nproc if nproc is not None else tree.parallel.tensor_parallel_size
    tree.data_parallel_size(ranks)
    # The ranks check these too; here a mistake shows before any of them starts.
    refuse_other_run(tree)
    open_data(tree)
    raise typer.Exit(launch(ranks, "fastslow_scale.train.worker", [config, *given, "--resume", resume], max_restarts))


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder or one of its checkpoints.")],
    prompt: Annotated[
        list[str], typer.Option(help="The text to go on from; several are generated together. Empty: a new document.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that make up this share.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same text.")] = 0,
) -> None:
    """Sample text from a trained model, on one process whatever layout it was trained with."""
    from fastslow_scale.inference import generate as text
    from fastslow_scale.inference.load import load_model

    loaded = load_model(run)
    for note in loaded.notes:
        print(note, file=sys.stderr)
    steps = text.generate(loaded, prompt, max_tokens, text.Sampling(temperature, top_p, seed))
    if len(prompt) == 1:
        for count, (piece,) in enumerate(steps):
            print(piece if count else prompt[0] + piece, end="", flush=True)
        print()
    else:
        grown = ["".join(pieces) for pieces in zip(*steps, strict=True)]
        print("\n\n".join(start + rest for start, rest in zip(prompt, grown, strict=True)))


def main() -> None:
    """Run the command line; the only place where a `UserError` becomes a line and an exit status."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        if first_to_report():
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = 130
    sys.exit(code)


def first_to_report() -> bool:
    """Whether no other rank of this job has reported a mistake: ranks that meet the same one say it once."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return bool(distributed.distributed_c10d._get_default_store().add("mistakes", 1) == 1)


if __name__ == "__main__":
    main()
