"""Files that are either whole or absent: hashes, durable writes, and folders built aside and renamed at the end."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.errors import UserError

_LOCK = ".lock"


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush, rename: `path` never holds a part of `content`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def refuse_existing(folder: Path) -> None:
    """Raises `UserError` where `folder` exists and is not an empty folder."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--output {folder} exists already: remove it or choose another --output")


@contextmanager
def building(folder: Path, *, replace: bool = False, keep: str = "") -> Iterator[Path]:
    """Yield an empty folder beside `folder`: it takes that name when the block ends well, and vanishes otherwise.

    The working folder is `.NAME.partial`; what a killed run left there is cleared by the next one. Only the subfolder
    `keep` survives a failure, unless it is empty, and is there when the next one begins. `replace` lets the new folder
    take the place of an old one.

    Raises:
        UserError: the output exists already, cannot be written, or another process is building it.
    """
    if not replace:
        refuse_existing(folder)
    partial = folder.parent / f".{folder.name}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / _LOCK).open("wb")
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {folder} is being written by another process") from None
        try:
            _clear(partial, keep)
            yield partial
            (partial / _LOCK).unlink()
            if replace and folder.exists():
                _swap(partial, folder)
            else:
                partial.rename(folder)
        except OSError as error:
            _abandon(partial, keep)
            raise UserError(f"--output {folder} cannot be written: {error.strerror}") from error
        except BaseException:
            _abandon(partial, keep)
            raise
    fsync_path(folder.parent)


def _swap(new: Path, folder: Path) -> None:
    """Rename twice, delete last: a kill in between never leaves a half-deleted folder under the name."""
    old = folder.parent / f".{folder.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)


def _abandon(partial: Path, keep: str) -> None:
    kept = partial / keep
    if keep and kept.is_dir() and any(kept.iterdir()):
        _clear(partial, keep)
    else:
        shutil.rmtree(partial, ignore_errors=True)


def _clear(folder: Path, keep: str) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name != keep:
                shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()
