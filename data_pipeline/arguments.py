"""Mistakes on a command line that typer lets pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import typer

from data_pipeline.errors import UserError

MAY_BE_EMPTY = ("--prompt",)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise `UserError` where one is empty, as an unset variable of the shell leaves it: as a path it would be `.`."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if argument.startswith("--") and argument.endswith("="):
            empty = argument[:-1]
        elif argument == "":
            empty = before if before.startswith("-") else f"the argument after {before}"
        else:
            continue
        if empty not in MAY_BE_EMPTY:
            raise UserError(f"{empty} must not be empty")


def finite(option: typer.CallbackParam, value: float) -> float:
    """A callback for typer, whose ranges let inf pass where they are open."""
    if not math.isfinite(value):
        raise UserError(f"{option.opts[0]} must be a finite number (got {value})")
    return value
