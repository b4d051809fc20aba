"""Text -> token ids: one unit of work at a time, in this process or in several."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.cutting import PIECE_CHARACTERS, Cutter
from data_pipeline.errors import UserError
from data_pipeline.faults import Fault, FaultCounts, OnFault, stop_at
from data_pipeline.index import token_dtype
from data_pipeline.readers import Document, Item, OnRead, read_extent
from data_pipeline.spool import SPOOLED_DTYPE, UnitSummary, save_unit, skipped_path, tokens_path
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.units import Unit

_RECORD = struct.Struct("<16sQQQQ")
_BUFFER_BYTES = 1 << 20
_RECIPE_VERSION = 1
"""To be raised with every change of what a unit's files hold."""


@dataclass(frozen=True)
class Reading:
    """How the inputs are read."""

    text_field: str = "text"
    skip_faults: bool = False

    def recipe(self, tokenizer: Tokenizer) -> str:
        """Two runs with the same recipe encode a file to the same tokens."""
        return f"{_RECIPE_VERSION} {tokenizer.sha256} {self.skip_faults} {self.text_field}"


def encode_unit(
    unit: Unit,
    key: str,
    reading: Reading,
    tokenizer: Tokenizer,
    folder: Path,
    on_read: OnRead = lambda num_bytes: None,
) -> UnitSummary:
    """Read, encode and write one unit. `on_read` is told of `unit.num_bytes` in all.

    Raises:
        UserError: at the first fault, unless faults are skipped; then they are listed in the unit's file.
        OSError: the folder cannot be written.
    """
    left = unit.num_bytes

    def on_some(num_bytes: int) -> None:
        """A part of a file is read a little beyond its end; that is not counted."""
        nonlocal left
        counted = min(num_bytes, left)
        left -= counted
        on_read(counted)

    items = (item for extent in unit.extents for item in read_extent(extent, reading.text_field, on_some))
    summary = encode_items(items, key, tokenizer, folder, skip_faults=reading.skip_faults)
    on_read(left)
    return summary


def encode_items(
    items: Iterable[Item], key: str, tokenizer: Tokenizer, folder: Path, *, skip_faults: bool = False
) -> UnitSummary:
    """Encode what a reader yields into the files of one unit; raises as `encode_unit` does."""
    faults = FaultCounts()
    try:
        with ExitStack() as stack:
            tokens = stack.enter_context(tokens_path(folder, key).open("wb", buffering=_BUFFER_BYTES))
            encoder = _Encoder(tokenizer, tokens)
            on_fault = _listing(faults, skipped_path(folder, key), stack) if skip_faults else stop_at
            for item in items:
                if isinstance(item, Fault):
                    encoder.drop()
                    on_fault(item)
                else:
                    encoder.add(item)
            tokens.flush()
            os.fsync(tokens.fileno())
        documents = np.frombuffer(encoder.records, dtype=SPOOLED_DTYPE)
        summary = UnitSummary(len(documents), encoder.num_tokens, encoder.with_nul, faults)
        save_unit(folder, key, summary, documents)
    except BaseException:
        for path in folder.glob(f"{key}.*"):
            path.unlink()
        raise
    return summary


def _listing(faults: FaultCounts, path: Path, stack: ExitStack) -> OnFault:
    """Counts faults, and lists them in a file that is made with the first one."""
    path.unlink(missing_ok=True)
    files: list[BinaryIO] = []

    def on_fault(fault: Fault) -> None:
        if not files:
            files.append(stack.enter_context(path.open("wb")))
        files[0].write(fault.as_json().encode("utf-8", "backslashreplace") + b"\n")
        faults.add(fault)

    return on_fault


class _Encoder:
    """Writes the tokens of documents, which may come in stretches, and keeps a record of each."""

    def __init__(self, tokenizer: Tokenizer, file: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._file = file
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._cutter = Cutter()
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = self._bytes = self._characters = 0
        self._has_nul = False
        self.num_tokens = self.with_nul = 0
        self.records = bytearray()

    def add(self, document: Document) -> None:
        """Raises `UserError` for a lone surrogate."""
        try:
            content = document.text.encode("utf-8")
            for piece in self._pieces(document):
                ids = self._tokenizer.encode_piece(piece).astype(self._dtype)
                self._file.write(ids.data)
                self._tokens += len(ids)
        except (UserError, UnicodeEncodeError):
            raise UserError(f"{document.source}: the text holds a lone surrogate, which is not text") from None
        self._digest.update(content)
        self._bytes += len(content)
        self._characters += len(document.text)
        self._has_nul = self._has_nul or b"\0" in content
        if not document.continues:
            self._finish()

    def _pieces(self, document: Document) -> Iterable[str]:
        if len(document.text) <= PIECE_CHARACTERS and not self._characters and not document.continues:
            return (document.text,)
        return self._cutter.feed(document.text, is_last=not document.continues)

    def _finish(self) -> None:
        record = (self.num_tokens, self._tokens, self._bytes, self._characters)
        self.records += _RECORD.pack(self._digest.digest(), *record)
        self.num_tokens += self._tokens
        self.with_nul += self._has_nul
        self._start()

    def drop(self) -> None:
        """Take back the document that was begun, if one was."""
        if self._tokens:
            self._file.seek(self.num_tokens * self._dtype.itemsize)
            self._file.truncate()
        self._cutter.drop()
        self._start()

    def _start(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = self._bytes = self._characters = 0
        self._has_nul = False
