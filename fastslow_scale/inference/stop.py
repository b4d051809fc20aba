"""Ends a stream of text before the first of some stop strings, wherever the stream's pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence

from data_pipeline.errors import UserError


class StopFilter:
    """Passes text on, but for what may be the beginning of a stop string: that waits until it is clear.

    The stop string that is complete first ends the text; of several that end with the same character, the longest.

    Attributes:
        stopped: a stop string came. No more text follows.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `UserError`: a stop string is empty."""
        if "" in stops:
            raise UserError("--stop must not be empty")
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What certainly comes before any stop string."""
        if self.stopped:
            return ""
        seen = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return seen[: min(found)[1]]
        clear = len(seen) - max((_overlap(seen, stop) for stop in self._stops), default=0)
        self._held = seen[clear:]
        return seen[:clear]

    def finish(self) -> str:
        """What was held back: no more text comes, so it begins no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
