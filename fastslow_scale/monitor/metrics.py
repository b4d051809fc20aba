"""metrics.jsonl: what a run measured, one JSON object a line, for programs to read.

Three kinds of objects share the file, told apart by their keys:

    {"step": 20, "tokens": 81920, "loss": 5.1, "lr": 0.001, ...}     a logged step
    {"step": 20, "validation_loss": 5.0}                             a validation after that step
    {"step": 20, "event": "skipped", "reason": "the loss ...", ...}  a step out of the ordinary: `measured` is its loss
                                                                     and gradient norm, `positions` its first and last

Numbers that JSON does not know are written as the strings "NaN", "Infinity" and "-Infinity", so that every JSON reader
accepts the file and a diverged run still says what happened; `read_metrics` turns them back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from data_pipeline.errors import UserError

Record = dict[str, Any]

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends records to a run's metrics.jsonl; each line is on its way to the disk when `write` returns.

    A run resumed at step N takes up the file as it was at that step: later lines are dropped, since those steps are
    about to be measured again. A run that starts at step 0 starts the file anew.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        kept = _rewind(path, start_step)
        self._validated = {record["step"] for record in kept if "validation_loss" in record}
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_to_line(record))
        self._file.flush()

    def has_validation(self, step: int) -> bool:
        return step in self._validated

    def write_validation(self, step: int, loss: float) -> bool:
        """Record a validation, unless this step already has one from before the resume; says whether it was new."""
        if step in self._validated:
            return False
        self._validated.add(step)
        self.write({"step": step, "validation_loss": loss})
        return True

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[Record]:
    """All records of a metrics.jsonl, in order. A last line cut off by a crash is left out.

    Raises:
        UserError: no such file, or a line other than the last is damaged.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError("not an object with a step")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UserError(f"{path} line {number} is damaged: {error}") from None
        records.append({key: _from_json(value) for key, value in record.items()})
    return records


@dataclass(frozen=True)
class RunSummary:
    """A run so far, as its metrics.jsonl tells it: over all its sessions, finished or not."""

    steps: int
    tokens: int
    training_seconds: float
    first_validation: Record | None
    last_validation: Record | None
    gate_norms: list[float]
    contributions: list[float]
    best_validation: Record | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.training_seconds if self.training_seconds > 0 else 0.0

    @classmethod
    def read(cls, run_dir: Path | str) -> RunSummary:
        return cls.of(read_metrics(Path(run_dir) / FILE_NAME))

    @classmethod
    def of(cls, records: Iterable[Record]) -> RunSummary:
        """Summarise records, where tokens_per_second of each covers the tokens since the record before it."""
        records = list(records)
        logged = [record for record in records if "loss" in record]
        validations = [record for record in records if "validation_loss" in record]
        last: Record = logged[-1] if logged else {}
        seconds, tokens_before = 0.0, 0
        for record in logged:
            if record["tokens_per_second"] > 0:
                seconds += (record["tokens"] - tokens_before) / record["tokens_per_second"]
            tokens_before = record["tokens"]
        return cls(
            steps=last.get("step", 0),
            tokens=last.get("tokens", 0),
            training_seconds=seconds,
            first_validation=validations[0] if validations else None,
            last_validation=validations[-1] if validations else None,
            best_validation=min(validations, key=lambda record: record["validation_loss"], default=None),
            gate_norms=list(last.get("gate_norm", [])),
            contributions=list(last.get("contribution", [])),
        )


def _rewind(path: Path, start_step: int) -> list[Record]:
    """Cut the file back to what a run at `start_step` had written, all or nothing; return what stays."""
    if not path.exists():
        return []
    kept = [record for record in read_metrics(path) if start_step > 0 and record["step"] <= start_step]
    text = "".join(_to_line(record) for record in kept)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return kept


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps({key: _to_json(value) for key, value in record.items()}, allow_nan=False) + "\n"


_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _NAMES.get(value, value) if isinstance(value, str) else value
