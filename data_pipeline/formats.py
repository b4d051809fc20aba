"""File endings: which files are text, rows or tables, and how they are compressed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

Compression = Literal["none", "gzip", "zstd"]
Kind = Literal["text", "rows", "table"]

PROSE_ENDINGS = frozenset((".txt", ".md"))

CODE_ENDINGS = frozenset(
    """
    .asm .awk .bash .bat .c .cc .cfg .clj .cljs .cmake .coffee .cpp .cs .css .cu .cuh .cxx .d .dart .diff .el .elm .erl
    .ex .exs .f .f03 .f08 .f90 .f95 .fs .fsx .glsl .go .gradle .graphql .groovy .h .hh .hlsl .hpp .hrl .hs .htm .html
    .hxx .inc .ini .java .jl .js .jsx .kt .kts .lean .less .lisp .lua .m .mk .ml .mli .mm .nim .nix .pas .patch .php .pl
    .pm .proto .ps1 .pxd .py .pyi .pyx .r .rb .rkt .rs .rst .s .sass .scala .scm .scss .sh .sol .sql .sv .svelte .swift
    .tcl .tex .tf .thrift .toml .ts .tsx .v .vb .vhd .vhdl .vim .vue .wat .xml .yaml .yml .zig .zsh
    """.split()
)
"""Whole files, one document each. Not `.json`: it may hold anything; `--ext .json` adds it."""

_ROWS_ENDING, _TABLE_ENDING = ".jsonl", ".parquet"
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_ENDINGS = ".txt, .md, .jsonl, these with .gz or .zst, .parquet, and code"
"""For messages."""


@dataclass(frozen=True)
class Format:
    """How a file is read."""

    kind: Kind
    """text: one document; rows: a JSON object a line; table: Parquet, a document a row."""
    compression: Compression = "none"
    is_code: bool = False


def format_of(name: str, more_endings: Collection[str] = ()) -> Format | None:
    """The format of a file by its ending (case does not matter), or None for a kind that is not known.

    Args:
        more_endings: further endings, with their dot, of files that are one document each.
    """
    path = PurePosixPath(name.lower())
    compression = _COMPRESSIONS.get(path.suffix, "none")
    if compression != "none":
        path = path.with_suffix("")
    ending = path.suffix
    if ending == _ROWS_ENDING:
        return Format("rows", compression)
    if ending in PROSE_ENDINGS or ending in more_endings:
        return Format("text", compression)
    if ending in CODE_ENDINGS:
        return Format("text", compression, is_code=True)
    if ending == _TABLE_ENDING and compression == "none":
        return Format("table")
    return None
