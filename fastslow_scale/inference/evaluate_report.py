"""What `fastslow eval` shows: progress, the numbers as lines, and all of them as JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably
from fastslow_scale.inference.evaluate import Evaluation, OnScore, Score

PARTS = 8
_SECONDS_BETWEEN_LINES = 10.0


def lines(found: Evaluation) -> list[str]:
    """The numbers for people: of all, of each source if there are several, and by position."""
    total = found.total
    shown = [
        f"checkpoint     {found.checkpoint}",
        f"data           {found.location}: {total.sequences:,} sequences of {found.seq_length:,} tokens",
        f"loss           {total.loss:.4f} nats a token",
        f"perplexity     {total.perplexity:.4f}",
        f"bits per byte  {_number(total.bits_per_byte)}",
        f"tokens         {total.num_tokens:,}",
        f"bytes          {total.num_bytes:,}",
    ]
    if len(found.sources) > 1:
        table: list[tuple[str, ...]] = [("source", "loss", "perplexity", "bits per byte", "tokens", "bytes")]
        for name, score in found.sources.items():
            numbers = (_number(value) for value in (score.loss, score.perplexity, score.bits_per_byte))
            table.append((name, *numbers, f"{score.num_tokens:,}", f"{score.num_bytes:,}"))
        shown += ["", *table_lines(table)]
    positions = [("positions", "loss")]
    reached = int(total.tokens.nonzero().max())
    for first, last, loss in total.by_position(PARTS):
        if first <= reached:
            positions.append((f"{first}-{min(last, reached)}", _number(loss)))
    if reached < found.seq_length - 1:
        positions.append((f"{reached + 1}-{found.seq_length - 1}", "no token"))
    return [*shown, "", *table_lines(positions)]


def _number(value: float) -> str:
    """Where there is nothing to take the mean of, as in a source of end marks alone: no number."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def table_lines(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Names on the left, numbers on the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]


def refuse_output(output: Path) -> None:
    """Before the work: raise `UserError` where the result could not be written."""
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file, such as {output / 'evaluation.json'}")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: the folder {output.parent} does not exist")


def write(found: Evaluation, output: Path) -> None:
    """Write the numbers as JSON. Raises `UserError`: they cannot be written."""
    content = {
        "checkpoint": str(found.checkpoint),
        "data": found.location,
        "seq_length": found.seq_length,
        **_to_json(found.total),
        "sources": {name: _to_json(score) for name, score in found.sources.items()},
    }
    write_json(content, output)


def write_json(content: dict[str, Any], output: Path) -> None:
    """Raises `UserError`: it cannot be written."""
    try:
        write_durably(output, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None


def _to_json(score: Score) -> dict[str, object]:
    return {
        "sequences": score.sequences,
        "tokens": score.num_tokens,
        "bytes": score.num_bytes,
        "nats": finite(score.nats.sum().item()),
        "loss": finite(score.loss),
        "perplexity": finite(score.perplexity),
        "bits_per_byte": finite(score.bits_per_byte),
        "loss_by_position": [finite(loss) for loss in (score.nats / score.tokens).tolist()],
        "tokens_by_position": score.tokens.tolist(),
    }


def finite(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return value if math.isfinite(value) else None


@contextmanager
def progress(total: int) -> Iterator[OnScore]:
    """Show on stderr how many of `total` sequences are done: a bar on a terminal, lines now and then elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda so_far: bar.update(task, completed=so_far.sequences, description=f"loss {so_far.loss:.4f}")
        return
    last = time.monotonic()

    def print_line(so_far: Score) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            console.print(f"{so_far.sequences} of {total} sequences: loss {so_far.loss:.4f}", markup=False)

    yield print_line
