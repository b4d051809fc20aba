"""What can be wrong with an input: a fault has a kind and a place; it ends the command, or is counted and listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.errors import UserError

_PLACES_KEPT = 3


@dataclass(frozen=True)
class Fault:
    """One document, or the rest of one file, that cannot be used."""

    kind: str
    """A short name that faults of one sort share; the report counts by it."""
    place: str
    """FILE, FILE:LINE or FILE:row NUMBER."""
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    def as_json(self) -> str:
        return json.dumps({"kind": self.kind, "place": self.place, "message": self.message}, ensure_ascii=False)


OnFault = Callable[[Fault], None]


def stop_at(fault: Fault) -> None:
    """Raises `UserError`: what happens to a fault unless the user wants it skipped."""
    raise UserError(str(fault))


@dataclass
class FaultCounts:
    """Faults by kind, with the first few places of each. Memory does not grow with their number."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: Fault) -> None:
        self._add(fault.kind, 1, [fault.place])

    def merge(self, other: FaultCounts) -> None:
        for kind, count in other.counts.items():
            self._add(kind, count, other.places.get(kind, ()))

    def _add(self, kind: str, count: int, places: Iterable[str]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.places.setdefault(kind, [])
        kept.extend(list(places)[: _PLACES_KEPT - len(kept)])

    def lines(self) -> list[str]:
        """The report: `skipped 7 x invalid UTF-8: FILE:3, FILE:9, FILE2:1, ...`"""
        report = []
        for kind, count in sorted(self.counts.items()):
            more = ", ..." if count > len(self.places[kind]) else ""
            report.append(f"skipped {count} x {kind}: {', '.join(self.places[kind])}{more}")
        return report

    def as_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "places": self.places}
