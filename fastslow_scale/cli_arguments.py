"""What several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/tiny.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the file's, such as optimizer.lr=1e-3."),
]
