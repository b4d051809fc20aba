"""From what the user names (files, folders, globs, URLs) to the list of files to read."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.formats import KNOWN_ENDINGS, Format, format_of
from data_pipeline.remote import is_url, list_urls


@dataclass(frozen=True)
class InputFile:
    """A file of the corpus. `size` in bytes, as stored; 0 where a server does not tell."""

    name: str
    """Absolute path, or URL."""
    size: int
    stamp: str
    """Changes when the file does: its modification time, or what the store tells."""
    format: Format


@dataclass(frozen=True)
class InputFiles:
    """The files of a corpus in sorted order, without repetition."""

    files: tuple[InputFile, ...]
    num_ignored: int = 0
    """Files below the named folders that have no known ending, or lie in a folder whose name begins with a dot."""
    num_empty: int = 0
    """Empty code files: usual in source trees (`__init__.py`), and no documents."""

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


class _Found:
    def __init__(self) -> None:
        self.files: dict[str, InputFile] = {}
        self.ignored: set[str] = set()
        self.empty: set[str] = set()

    def add(self, file: InputFile) -> None:
        if file.format.is_code and file.size == 0 and not is_url(file.name):
            self.empty.add(file.name)
        else:
            self.files[file.name] = file


def find_files(inputs: Iterable[str], more_endings: Iterable[str] = ()) -> InputFiles:
    """Resolve files, folders (searched to any depth), globs (`**` crosses folders) and URLs.

    Args:
        more_endings: further endings of files that are one document each, such as `.json`; the dot may be left out.

    Raises:
        UserError: an input that names nothing, or a file of an unknown kind named outright or by a glob.
    """
    endings = {f".{ending.lower().lstrip('.')}" for ending in more_endings}
    found = _Found()
    for name in inputs:
        if is_url(name):
            _add_urls(found, name, endings)
        else:
            _add_local(found, name, endings)
    if not found.files and not found.empty:
        raise UserError("--input names no file")
    if not found.files:
        raise UserError("--input names nothing but empty files")
    files = tuple(found.files[name] for name in sorted(found.files))
    return InputFiles(files, len(found.ignored), len(found.empty))


def _add_local(found: _Found, name: str, endings: Collection[str]) -> None:
    is_glob = glob.has_magic(name) and not Path(name).exists()
    matches = sorted(glob.glob(name, recursive=True)) if is_glob else [name]
    if not matches:
        raise UserError(f"--input {name} matches no file")
    for match in matches:
        path = Path(match)
        if path.is_dir():
            if not _add_folder(found, path, endings) and len(matches) == 1:
                raise UserError(f"--input {path} is a folder that holds no file of a known kind ({KNOWN_ENDINGS})")
        elif not path.exists():
            raise UserError(f"--input {path} does not exist")
        else:
            kind = format_of(path.name, endings)
            if kind is None:
                raise _unknown(str(path))
            found.add(_local_file(path, kind))


def _add_folder(found: _Found, root: Path, endings: Collection[str]) -> int:
    """Returns the number of files with a known ending."""
    known = 0
    for folder, subfolders, names in os.walk(root):
        hidden = [name for name in subfolders if name.startswith(".")]
        subfolders[:] = sorted(set(subfolders) - set(hidden))
        for name in hidden:
            found.ignored.update(str(path) for path in Path(folder, name).rglob("*") if path.is_file())
        for name in names:
            path = Path(folder, name)
            kind = format_of(name, endings)
            if kind is None or not path.is_file():
                found.ignored.add(str(path))
            else:
                known += 1
                found.add(_local_file(path, kind))
    return known


def _local_file(path: Path, kind: Format) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return InputFile(str(path.resolve()), status.st_size, str(status.st_mtime_ns), kind)


def _add_urls(found: _Found, url: str, endings: Collection[str]) -> None:
    listed = list_urls(url)
    if not listed:
        raise UserError(f"--input {url} matches no file")
    for name, size, stamp in listed:
        kind = format_of(name.partition("?")[0], endings)
        if kind is not None:
            found.add(InputFile(name, size, stamp, kind))
        elif len(listed) == 1:
            raise _unknown(url)
        else:
            found.ignored.add(name)


def _unknown(name: str) -> UserError:
    return UserError(f"--input {name} is of an unknown kind (known: {KNOWN_ENDINGS}; --ext adds an ending)")
