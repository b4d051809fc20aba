"""How every command ends: a mistake or a failure is one line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from data_pipeline.errors import UserError
from fastslow_scale.errors import RunError

# typer brings a click of its own, whose errors are not those of a click that is installed beside it.
CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def exit_status(function: Callable[[], int | None]) -> int:
    """Call it; the status it returns (None: 0), or that of the error it raises, after a line about it."""
    try:
        return function() or 0
    except UserError as error:
        if first_to_report():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except CommandLineError as error:
        print(f"error: {' '.join(error.format_message().split())} (--help says more)", file=sys.stderr, flush=True)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def first_to_report() -> bool:
    """Whether no other rank of this job has reported a mistake: ranks that meet the same one say it once."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return bool(distributed.distributed_c10d._get_default_store().add("mistakes", 1) == 1)
