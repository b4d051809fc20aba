"""Reads what Weights & Biases leaves in offline mode: a LevelDB log of protobuf records, behind a header of its own.

The layout: https://github.com/google/leveldb/blob/main/doc/log_format.md, 7 bytes of header counted to the first block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, RECORD_HEADER = 32768, 7, 7
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """wandb's own messages of one file `run-ID.wandb`, in order."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, message = HEADER, b""
    while place + RECORD_HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        data = content[place + RECORD_HEADER : place + RECORD_HEADER + size]
        place += RECORD_HEADER + size
        message = data if kind in (FULL, FIRST) else message + data
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record


def offline_files(run_dir: Path, seconds: float = 60) -> list[Path]:
    """One for each start that came to its end, oldest first. wandb's own process writes them, a little later."""
    end = time.monotonic() + seconds
    while True:
        paths = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=_start)
        if paths and all(any(record.HasField("exit") for record in records(path)) for path in paths):
            return paths
        assert time.monotonic() < end, f"not ended: {paths}"
        time.sleep(0.1)


def _start(path: Path) -> float:
    """When a start began, as wandb was told."""
    return next((record.run.start_time.ToNanoseconds() for record in records(path) if record.HasField("run")), 0.0)


def rows(path: Path) -> list[dict[str, Any]]:
    """The logged rows, without wandb's own columns."""
    found = []
    for record in records(path):
        if record.HasField("history"):
            items = (
                (item.key or ".".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item
            )
            found.append({key: value for key, value in items if not key.startswith("_")})
    return found


def run_record(path: Path) -> Any:
    """What wandb was told of the run: run_id, project, display_name, config."""
    return next(record.run for record in records(path) if record.HasField("run"))
