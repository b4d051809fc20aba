"""metrics.csv: the numbers of metrics.jsonl as a table with one row a step, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastslow_scale.monitor.logs import numbers

FILE_NAME = "metrics.csv"


class CsvLog:
    """A row is a step, with its validation if there was one; a number that a step does not have is an empty cell.

    The file is made anew from metrics.jsonl at every start: it follows that file through resumes and rollbacks, and
    has the whole run even if it is asked for in the middle.
    """

    def __init__(self, path: Path, so_far: Iterable[Mapping[str, Any]]) -> None:
        """so_far: the records of metrics.jsonl; events, which are words, are left out."""
        self._path = path
        rows: dict[int, dict[str, Any]] = {}
        for record in so_far:
            if "event" not in record:
                rows.setdefault(record["step"], {}).update(_row(record))
        self._columns = _union(["step"], *rows.values())
        self._rewrite(list(rows.values()))

    def write(self, record: Mapping[str, Any]) -> None:
        row = _row(record)
        is_same = self._last.get("step") == record["step"]
        if is_same:
            row = self._last | row
        columns = _union(self._columns, row)
        if columns != self._columns:
            rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(self._path.read_text(encoding="utf-8"))))
            self._columns = columns
            self._file.close()
            self._rewrite([*(rows[:-1] if is_same else rows), row])
            return
        if is_same:
            self._file.seek(self._last_start)  # the row only grows, so that nothing of the old one stays behind it
        self._append(row)

    def close(self, failed: bool) -> None:
        self._file.close()

    def _append(self, row: dict[str, Any]) -> None:
        self._last, self._last_start = row, self._file.tell()
        self._file.write(_line(row.get(column, "") for column in self._columns))
        self._file.flush()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._file = temporary.open("w", encoding="utf-8", newline="")
        self._file.write(_line(self._columns))
        self._last, self._last_start = dict[str, Any](), 0
        for row in rows:
            self._append(row)
        os.replace(temporary, self._path)


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": record["step"], **dict(numbers(record))}


def _union(columns: Iterable[str], *rows: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*columns, *(key for row in rows for key in row)]))


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
