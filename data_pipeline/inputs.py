"""From what the user names (files, folders, globs) to documents, each checked to be text that survives a round trip."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError


@dataclass(frozen=True)
class Document:
    """One document, and where it came from (`FILE` or `FILE:LINE`)."""

    text: str
    source: str


@dataclass(frozen=True)
class InputFiles:
    """The files of a corpus in sorted order, without repetition."""

    paths: tuple[Path, ...]
    num_ignored: int
    """Files below the named folders that have no known ending."""

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def find_files(inputs: Iterable[str]) -> InputFiles:
    """Resolve files, folders (searched to any depth) and globs (`**` crosses folders).

    Raises:
        UserError: an input that names nothing, or a file of an unknown kind named outright or by a glob.
    """
    found: dict[Path, None] = {}
    num_ignored = 0
    for name in inputs:
        is_glob = glob.has_magic(name) and not Path(name).exists()
        matches = sorted(glob.glob(name, recursive=True)) if is_glob else [name]
        if not matches:
            raise UserError(f"--input {name} matches no file")
        for match in matches:
            path = Path(match)
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                known = [file for file in files if file.suffix in _READERS]
                num_ignored += len(files) - len(known)
                if not known and len(matches) == 1:
                    raise UserError(f"--input {path} is a folder that holds no {_known_endings()} file")
            elif not path.exists():
                raise UserError(f"--input {path} does not exist")
            elif path.suffix not in _READERS:
                raise UserError(f"--input {path} is of an unknown kind (known: {_known_endings()})")
            else:
                known = [path]
            found.update((file.resolve(), None) for file in known)
    if not found:
        raise UserError("--input names no file")
    return InputFiles(tuple(sorted(found)), num_ignored)


def read_documents(
    files: InputFiles, text_field: str = "text", on_file_done: Callable[[Path], None] = lambda path: None
) -> Iterator[Document]:
    """Yield every document of every file, in the order of the files.

    `on_file_done` is told of each file after its last document.

    Raises:
        UserError: naming file and line: unreadable or empty file, invalid UTF-8, lone surrogate, broken JSON, a row
            without a text, an empty document.
    """
    for path in files.paths:
        try:
            if path.stat().st_size == 0:
                raise UserError(f"{path}: the file is empty")
            yield from _READERS[path.suffix](path, text_field)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        on_file_done(path)


def _read_text(path: Path, text_field: str) -> Iterator[Document]:
    """The whole file is one document, its line ends and byte-order mark untouched."""
    content = path.read_bytes()
    yield Document(_decode(content, str(path), first_line=1), str(path))


def _read_json_lines(path: Path, text_field: str) -> Iterator[Document]:
    """One JSON object a line; lines of nothing but white space hold no row."""
    num_rows = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            num_rows += 1
            source = f"{path}:{number}"
            yield Document(_text_of_row(_decode(line, str(path), number), source, text_field), source)
    if not num_rows:
        raise UserError(f"{path}: the file holds no rows")


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {".txt": _read_text, ".jsonl": _read_json_lines}
"""File ending -> reader. A new format is one function and one line here."""


def _known_endings() -> str:
    return ", ".join(sorted(_READERS))


def _decode(content: bytes, path: str, first_line: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: invalid UTF-8 (byte 0x{content[error.start]:02X})") from None


def _text_of_row(line: str, source: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not a JSON row: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{source}: the row must be a JSON object (got {type(row).__name__})")
    if text_field not in row:
        fields = ", ".join(str(name) for name in list(row)[:8]) or "none"
        raise UserError(f"{source}: the row has no field {text_field!r} (it has: {fields}); name it with --text-field")
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(f"{source}: field {text_field!r} must be text (got {type(text).__name__})")
    if not text:
        raise UserError(f"{source}: field {text_field!r} is empty")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{source}: field {text_field!r} holds a lone surrogate, which is not text")
    return text
