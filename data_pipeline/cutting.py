"""Cuts long texts into pieces that are encoded one by one, with the ids of the whole, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 14
"""A piece ends after the first newline from here on. Much longer ones cost more time per byte."""

LINE_CHARACTERS = 1 << 16
"""Without a newline up to here, a piece ends before the next space that follows another character."""

LONGEST_PIECE = 1 << 17
"""Without such a space either, it ends here."""

_BEFORE_A_SPACE = re.compile(r"[^ ](?= )")


class Cutter:
    """Takes a text in stretches of any lengths; the pieces depend on the text alone.

    A newline is a piece of the vocabulary of its own, and a vocabulary made here has no piece with a space behind
    another character, so cuts at those places change no id. A cut at `LONGEST_PIECE` may; it loses nothing.
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str, *, is_last: bool) -> Iterator[str]:
        """Yield the pieces that are known now; all of them if this is the last stretch. Must be read to its end."""
        text = self._rest + text if self._rest else text
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = _end_of_piece(text, start)
            if not end:
                break
            yield text[start:end]
            start = end
        self._rest = text[start:] if start else text
        if is_last:
            if self._rest:
                yield self._rest
            self._rest = ""

    def drop(self) -> None:
        """Forget what is held back, for a document that will not be finished."""
        self._rest = ""


def _end_of_piece(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends, 0 where more text must be seen first (or none follows)."""
    available = len(text) - start
    end = text.find("\n", start + PIECE_CHARACTERS - 1, start + LINE_CHARACTERS) + 1
    if end:
        return end
    if available < LINE_CHARACTERS:
        return 0
    space = _BEFORE_A_SPACE.search(text, start + LINE_CHARACTERS - 1, start + LONGEST_PIECE)
    if space:
        return space.end()
    if available < LONGEST_PIECE:
        return 0
    return start + LONGEST_PIECE


def pieces(text: str) -> Iterator[str]:
    """The pieces of a whole text."""
    return Cutter().feed(text, is_last=True)
