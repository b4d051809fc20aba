"""What TensorBoard, the CSV file and Weights & Biases have in common: they take the records of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "tokens": "data/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "mfu": "speed/mfu",
    "data_seconds": "speed/data_seconds",
    "forward_seconds": "speed/forward_seconds",
    "backward_seconds": "speed/backward_seconds",
    "communication_seconds": "speed/communication_seconds",
    "optimizer_seconds": "speed/optimizer_seconds",
    "other_seconds": "speed/other_seconds",
    "memory_gb": "memory/peak_gb",
    "skipped_steps": "optim/skipped_steps",
    "gate_norm": "coupling/gate_norm",
    "contribution": "coupling/contribution",
}
"""The groups in which people look for a curve."""


class Log(Protocol):
    """Takes each logged step and each validation, in the order of metrics.jsonl; what is written outlives a kill."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A record with a `step`, numbers, and lists with one number an exchange."""

    def close(self, failed: bool) -> None:
        """failed: an error ends the run."""


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number but the step under its key; those of a list under KEY/0, KEY/1, ..."""
    for key, value in record.items():
        if isinstance(value, list | tuple):
            yield from ((f"{key}/{index}", item) for index, item in enumerate(value))
        elif key != "step":
            yield key, value


def curves(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The same under the names of curves, such as coupling/gate_norm/0."""
    for key, value in record.items():
        tag = TAGS.get(key, key if "/" in key else f"other/{key}")
        yield from ((tag + name.removeprefix(key), number) for name, number in numbers({key: value}))
