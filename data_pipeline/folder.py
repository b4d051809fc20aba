"""Where a data folder lies: on a disk of this machine, or behind a URL with a cache on a disk."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_pipeline.errors import DamagedError
from data_pipeline.index import ShardInfo

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(location: Path | str) -> bool:
    return _URL.match(str(location)) is not None


@dataclass(frozen=True)
class Retries:
    """How long to insist on an answer from a server."""

    attempts: int = 6
    first_wait: float = 0.5
    """Seconds before the second attempt; doubled before each further one."""
    attempt_seconds: float = 60.0
    """One attempt may take as long, and a second more for each megabyte."""
    wait: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class CacheSettings:
    """Where the shards of URLs are kept, and how much of the disk they may take."""

    folder: Path = Path("data/cache")
    gigabytes: float = 100.0
    retries: Retries = Retries()


class Span(NamedTuple):
    """Where a member's payload lies in its shard, in bytes, and its checksum."""

    offset: int
    size: int
    crc32: int


class DataFolder(Protocol):
    """What a reader needs of a data folder."""

    location: str
    """As the user named it, for messages."""
    path: Path
    """The local folder that holds its manifest and, once `local` was asked for them, its tokenizer and tables."""
    far_away: bool
    """Whether shards must be fetched before they can be read."""

    def local(self, name: str, sha256: str) -> Path:
        """A small file as a local one. Its content may be damaged or missing where the folder is local."""

    def check_size(self, split: str, shard: ShardInfo) -> None:
        """Raises `DamagedError` where the shard is known to be missing or to have another size."""

    def open_shard(self, split: str, shard: ShardInfo) -> int:
        """A descriptor open for reading, which the caller closes. Raises `DamagedError`."""

    def read(self, split: str, shard: ShardInfo, span: Span) -> bytes:
        """A member's payload, as far as it is there, unchecked. Raises `DamagedError`."""

    def prefetch(self, split: str, members: Sequence[tuple[ShardInfo, Span]]) -> None:
        """These members will soon be read."""


def open_folder(location: Path | str, cache: CacheSettings | None = None) -> DataFolder:
    """A folder by its path or URL.

    Raises:
        UserError: a URL that cannot be read.
    """
    if is_url(location):
        from data_pipeline.remote_folder import RemoteFolder

        return RemoteFolder(str(location), cache or CacheSettings())
    return LocalFolder(Path(location))


class LocalFolder:
    """A folder on a disk, or on a network file system, of this machine."""

    far_away = False
    files_kept = 64

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)
        self._files: OrderedDict[str, int] = OrderedDict()

    def local(self, name: str, sha256: str) -> Path:
        return self.path / name

    def check_size(self, split: str, shard: ShardInfo) -> None:
        path = self.path / split / shard.name
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
        if actual != shard.bytes:
            raise DamagedError(f"{path} has {actual} bytes, the manifest says {shard.bytes}")

    def open_shard(self, split: str, shard: ShardInfo) -> int:
        path = self.path / split / shard.name
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from None

    def read(self, split: str, shard: ShardInfo, span: Span) -> bytes:
        """pread, not mmap: a file cut short while it is read gives a short answer here and a SIGBUS there."""
        name = f"{split}/{shard.name}"
        descriptor = self._files.get(name)
        if descriptor is None:
            descriptor = self._files[name] = self.open_shard(split, shard)
            if len(self._files) > self.files_kept:
                os.close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(name)
        try:
            return os.pread(descriptor, span.size, span.offset)
        except OSError as error:
            raise DamagedError(f"{self.path / name} cannot be read: {error.strerror}") from None

    def prefetch(self, split: str, members: Sequence[tuple[ShardInfo, Span]]) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)
