"""Cuts a corpus into units of work: one process encodes one at a time; an interrupted run keeps those it has done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_pipeline.formats import Kind
from data_pipeline.inputs import InputFile, InputFiles
from data_pipeline.readers import Extent
from data_pipeline.streams import STREAM_ERRORS, open_stream

SMALLEST_UNIT_BYTES = 8 << 20
LARGEST_UNIT_BYTES = 1 << 30
_UNITS_WANTED = 512


@dataclass(frozen=True)
class Unit:
    """Several small files, one file, or a part of a large one."""

    extents: tuple[Extent, ...]
    num_bytes: int

    def key(self, recipe: str) -> str:
        """Hex name of this unit's result: another file, another content or another recipe has another name."""
        parts = [
            (extent.file.name, extent.file.size, extent.file.stamp, extent.start, extent.stop)
            for extent in self.extents
        ]
        return hashlib.sha256(json.dumps([recipe, parts]).encode()).hexdigest()[:32]


def plan_units(files: InputFiles) -> list[Unit]:
    """Units of about equal size, the same ones each time for the same files.

    Plain .jsonl files are cut at bytes, .parquet files at row groups; compressed files and texts stay whole.
    """
    size = min(max(files.num_bytes // _UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    return list(_grouped(_extents(files.files, size), size))


def _extents(files: Iterable[InputFile], size: int) -> Iterator[tuple[Extent, int]]:
    """Extents with their sizes in bytes, about."""
    for file in files:
        kind: Kind = file.format.kind
        if file.size > size and kind == "rows" and file.format.compression == "none":
            count = -(-file.size // size)
            bounds = [file.size * number // count for number in range(count)]
            for start, stop in zip(bounds, [*bounds[1:], None], strict=True):
                yield Extent(file, start, stop), file.size // count
        elif file.size > size and kind == "table":
            yield from _row_groups(file, size)
        else:
            yield Extent(file), file.size


def _row_groups(file: InputFile, size: int) -> Iterator[tuple[Extent, int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_stream(file.name, "none") as stream:
            num_groups = pyarrow.parquet.ParquetFile(stream).num_row_groups
    except (pyarrow.ArrowException, *STREAM_ERRORS):
        num_groups = 0  # its reader will say what is wrong with it
    groups_each = max(1, num_groups * size // file.size)
    if num_groups <= groups_each:
        yield Extent(file), file.size
        return
    for start in range(0, num_groups, groups_each):
        stop = min(start + groups_each, num_groups)
        yield Extent(file, start, stop), file.size * (stop - start) // num_groups


def _grouped(extents: Iterable[tuple[Extent, int]], size: int) -> Iterator[Unit]:
    group: list[Extent] = []
    total = 0
    for extent, num_bytes in extents:
        if group and total + num_bytes > size:
            yield Unit(tuple(group), total)
            group, total = [], 0
        group.append(extent)
        total += num_bytes
    if group:
        yield Unit(tuple(group), total)
