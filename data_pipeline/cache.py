"""A folder of bounded size that holds copies of what lies far away, shared by all processes of a machine.

    NAME                a whole entry; readers lock it (shared) while they use it
    NAME.SIZE.part      one that is being fetched; its owner holds an exclusive lock on it until it is whole
    .lock               held while room is made, so that no two processes promise the same room

Locks belong to open files, so those of a killed process vanish with it, and what it left half done is taken over. The
folder must lie on a disk of this machine: some network file systems do not keep locks.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError

_LOCK = ".lock"
_PART = ".part"
_SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class _Entry:
    path: Path
    size: int
    used: float
    """When it was last read, or started."""


class Cache:
    """Entries by name; at no moment do they, and what is being fetched, take more than `limit` bytes."""

    def __init__(self, folder: Path, limit: int, seconds_for_room: float = 60.0) -> None:
        """`seconds_for_room`: how long to wait for others to let go of what they use.

        Raises:
            UserError: the folder cannot be written, or its file system has no locks.
        """
        self.folder, self.limit = folder, limit
        self._seconds_for_room = seconds_for_room
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _LOCK).touch()
        except OSError as error:
            raise UserError(f"data.cache_dir {folder} cannot be written: {error.strerror}") from None
        try:
            with self._room_lock():
                pass
        except OSError as error:
            raise UserError(
                f"data.cache_dir {folder} cannot be locked: {error.strerror}; it must be on a disk of this machine"
            ) from None

    def open(self, name: str, size: int, fetch: Callable[[Path], None]) -> int:
        """A descriptor of the whole entry, open for reading; it stays in the cache until that is closed.

        Args:
            size: of the entry, in bytes.
            fetch: writes the entry into the file named, which exists; called where the entry is not there.

        Raises:
            UserError: there is no room for it; and whatever `fetch` raises.
        """
        if size > self.limit:
            raise UserError(
                f"data.cache_gb: {name} takes {size / 1e9:.3g} GB, all of the cache may take {self.limit / 1e9:.3g} GB"
            )
        deadline = time.monotonic() + self._seconds_for_room
        while True:
            descriptor = self._open_whole(name)
            if descriptor is not None:
                return descriptor
            part = self.folder / f"{name}.{size}{_PART}"
            descriptor, is_ours = self._claim(part, name, size)
            if descriptor is None:  # everything is in use
                if time.monotonic() > deadline:
                    raise UserError(
                        f"data.cache_gb: {self.limit / 1e9:.3g} GB in {self.folder} are too few: all of it is in use"
                    )
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            elif is_ours:
                return self._fill(descriptor, part, name, fetch)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # until its owner has it whole, gave up or died
                os.close(descriptor)

    def _fill(self, descriptor: int, part: Path, name: str, fetch: Callable[[Path], None]) -> int:
        try:
            fetch(part)
            os.fsync(descriptor)
            with self._room_lock():  # an eviction cannot come between the name and the lock
                part.rename(self.folder / name)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            self._give_up(descriptor, part)
            raise UserError(f"data.cache_dir {self.folder} cannot be written: {error.strerror}") from None
        except BaseException:
            self._give_up(descriptor, part)
            raise
        return descriptor

    def _give_up(self, descriptor: int, part: Path) -> None:
        part.unlink(missing_ok=True)
        os.close(descriptor)

    def _open_whole(self, name: str) -> int | None:
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink == 0:  # evicted between the two calls
            os.close(descriptor)
            return None
        os.utime(descriptor)
        return descriptor

    def _claim(self, part: Path, name: str, size: int) -> tuple[int | None, bool]:
        """(descriptor of the part, whether we hold it), or (None, False) where there is no room now."""
        with self._room_lock():
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _locked(descriptor):
                return descriptor, False
            if (self.folder / name).exists():  # became whole since we looked: let the caller look again
                part.unlink()
                return descriptor, False
            if not self._make_room(size, part):
                self._give_up(descriptor, part)
                return None, False
            return descriptor, True

    def _make_room(self, size: int, ours: Path) -> bool:
        """Remove what was not used for the longest time, nothing that is in use, until `size` bytes are free."""
        entries = [entry for entry in self._entries() if entry.path != ours]
        free = self.limit - sum(entry.size for entry in entries)
        for entry in sorted(entries, key=lambda entry: entry.used):
            if free >= size:
                break
            if _remove_unused(entry.path):
                free += entry.size
        return free >= size

    def _entries(self) -> Iterator[_Entry]:
        with os.scandir(self.folder) as files:
            for file in files:
                if file.name == _LOCK:
                    continue
                with suppress(FileNotFoundError):
                    status = file.stat()
                    size = int(file.name.split(".")[-2]) if file.name.endswith(_PART) else status.st_size
                    yield _Entry(Path(file.path), size, status.st_mtime)

    @contextmanager
    def _room_lock(self) -> Iterator[None]:
        with (self.folder / _LOCK).open("r+b") as lock:  # NFS gives exclusive locks to writers only
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _locked(descriptor: int) -> bool:
    """Take the exclusive lock, if nobody holds any."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:  # another user's
        return False
    try:
        if not _locked(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)
