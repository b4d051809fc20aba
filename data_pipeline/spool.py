"""Encoded documents between encoding and packing: per unit of work a file of token ids and a table of documents.

KEY.tokens   the ids of all documents one after another
KEY.npy      a record per document
KEY.skipped  a JSON line per fault, where there was one
KEY.json     the summary; written last, so a unit that has one is whole
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.faults import FaultCounts
from data_pipeline.files import write_durably

SPOOLED_DTYPE = np.dtype(
    [("digest", "V16"), ("offset", "<u8"), ("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8")]
)
"""offset: in tokens from the start of the unit's file."""

_FILES_KEPT = 256
_SKIPPED = ".skipped"


@dataclass(frozen=True)
class UnitSummary:
    """What came out of a unit."""

    documents: int
    tokens: int
    with_nul: int
    """Documents that hold NUL characters: text like any other, but often a sign of something else."""
    faults: FaultCounts = field(default_factory=FaultCounts)


def tokens_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.tokens"


def skipped_path(folder: Path, key: str) -> Path:
    return folder / f"{key}{_SKIPPED}"


def save_unit(folder: Path, key: str, summary: UnitSummary, documents: npt.NDArray[Any]) -> None:
    """Call last, when the token file is on the disk."""
    with (folder / f"{key}.npy").open("wb") as file:
        np.save(file, documents, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    content = {**vars(summary), "faults": summary.faults.as_dict()}
    write_durably(folder / f"{key}.json", json.dumps(content).encode())


def load_summary(folder: Path, key: str, dtype: np.dtype[Any]) -> UnitSummary | None:
    """None where the unit is not there, or not whole."""
    try:
        content = json.loads((folder / f"{key}.json").read_bytes())
        summary = UnitSummary(**{**content, "faults": FaultCounts(**content["faults"])})
        num_bytes = tokens_path(folder, key).stat().st_size
        documents = np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    whole = num_bytes == summary.tokens * dtype.itemsize and len(documents) == summary.documents
    return summary if whole and documents.dtype == SPOOLED_DTYPE else None


def remove_others(folder: Path, keys: set[str]) -> int:
    """Delete what belongs to no unit in `keys`; returns how many whole units that were."""
    whole = 0
    for path in folder.iterdir():
        if path.name.partition(".")[0] not in keys:
            whole += path.suffix == ".json"
            path.unlink()
    return whole


class Spool:
    """Random access to the tokens of all documents, with few files open and nothing kept in memory but the table."""

    def __init__(self, folder: Path, keys: Sequence[str], dtype: np.dtype[Any]) -> None:
        """`keys`: the units, in the order of the input."""
        self.dtype = dtype
        self._paths = [tokens_path(folder, key) for key in keys]
        tables = [np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in keys]
        total = sum(map(len, tables))
        self.documents: npt.NDArray[Any] = np.empty(total, dtype=SPOOLED_DTYPE)
        self._part = np.empty(total, dtype=np.uint32)
        start = 0
        for number, table in enumerate(tables):
            self.documents[start : start + len(table)] = table
            self._part[start : start + len(table)] = number
            start += len(table)
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, document: int, start: int, count: int) -> npt.NDArray[Any]:
        """[count] tokens of a document, from its token `start` on."""
        offset = (int(self.documents["offset"][document]) + start) * self.dtype.itemsize
        size = count * self.dtype.itemsize
        content = os.pread(self._file(int(self._part[document])), size, offset)
        if len(content) != size:
            raise OSError(f"{self._paths[self._part[document]]} was changed while it was read")
        return np.frombuffer(content, dtype=self.dtype)

    def _file(self, part: int) -> int:
        descriptor = self._files.get(part)
        if descriptor is None:
            descriptor = self._files[part] = os.open(self._paths[part], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > _FILES_KEPT:
                os.close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(part)
        return descriptor

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def skipped_lines(folder: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """The JSON lines of all faults, in the order of the input."""
    for key in keys:
        path = skipped_path(folder, key)
        if path.is_file():
            with path.open("rb") as file:
                yield from file
