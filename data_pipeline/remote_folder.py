"""Data folders behind URLs: fetched in whole shards, or member by member, through a cache of bounded size.

A shard is fetched whole where the cache can hold the data. Where it cannot, members are fetched alone: the order visits
members from everywhere, and whole shards would be fetched again for each of their members.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.cache import Cache
from data_pipeline.errors import DamagedError, UserError
from data_pipeline.files import sha256_of
from data_pipeline.folder import CacheSettings, Retries, Span
from data_pipeline.index import MANIFEST_NAME, Manifest, ShardInfo

_SCHEMES = ("http", "https", "s3", "gs")
_SLOWEST_BYTES_PER_SECOND = 1e6
_LARGEST_TABLE = 10**9
_PREFETCH_THREADS = 4
_WRONG_ANSWERS = 2  # whole, but not what was written: twice the same is no accident of the way
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

T = TypeVar("T")


class RemoteFolder:
    """A data folder behind a URL. Its small files lie in the cache's folder, beside the bounded part."""

    far_away = True

    def __init__(self, url: str, cache: CacheSettings) -> None:
        """Fetch the manifest.

        Raises:
            UserError: a URL of another kind, without a data folder, or that does not answer.
        """
        self.location = url.rstrip("/")
        self._store = Store(self.location, cache.retries)
        self._cache = Cache(cache.folder / "shards", int(cache.gigabytes * 1e9))
        try:
            content = self._store.read(MANIFEST_NAME)
        except DamagedError:
            raise UserError(f"{self.location} is not a data folder: it has no {MANIFEST_NAME}") from None
        self.path = cache.folder / "folders" / hashlib.sha256(content).hexdigest()
        _write(self.path / MANIFEST_NAME, content)
        try:
            manifest = Manifest.load(self.path)
        except UserError as error:
            raise UserError(str(error).replace(str(self.path), self.location)) from None
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        self._whole_shards = sum(shard.bytes for shard in shards) <= self._cache.limit
        self._damaged: set[str] = set()
        self._prefetcher = _Prefetcher()

    def local(self, name: str, sha256: str) -> Path:
        path = self.path / name
        if not path.is_file() or sha256_of(path) != sha256:
            content = self._store.read(name)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise DamagedError(f"{self.location}/{name} is damaged: its sha256 differs from the manifest's")
            _write(path, content)
        return path

    def check_size(self, split: str, shard: ShardInfo) -> None:
        """Nothing: asking for each of many shards takes long. Each is checked when it is fetched."""

    def open_shard(self, split: str, shard: ShardInfo) -> int:
        """Of the shard, or of what the server has in its place: its members are checked when they are read."""
        name = f"{split}/{shard.name}"
        if shard.sha256 not in self._damaged:
            try:
                return self._cache.open(
                    shard.sha256,
                    shard.bytes,
                    lambda path: self._store.fetch(name, path, shard.bytes, lambda: _fault_of_shard(path, shard)),
                )
            except DamagedError:
                self._damaged.add(shard.sha256)
        return self._cache.open(
            f"{shard.sha256}-damaged",
            shard.bytes,
            lambda path: self._store.fetch(name, path, shard.bytes, lambda: _too_long(path, shard)),
        )

    def read(self, split: str, shard: ShardInfo, span: Span) -> bytes:
        if self._whole_shards:
            descriptor = self.open_shard(split, shard)
        else:
            descriptor = self._open_member(split, shard, span)
        try:
            return os.pread(descriptor, span.size, span.offset if self._whole_shards else 0)
        finally:
            os.close(descriptor)

    def prefetch(self, split: str, members: Sequence[tuple[ShardInfo, Span]]) -> None:
        """Only as much as the cache holds at once: more would drive out what is needed first."""
        room = self._cache.limit
        tasks: list[Callable[[], int]] = []
        seen: set[str] = set()
        for shard, span in members:
            if self._whole_shards and shard.name in seen:
                continue
            seen.add(shard.name)
            room -= shard.bytes if self._whole_shards else span.size
            if room < 0:
                break
            if self._whole_shards:
                tasks.append(lambda shard=shard: self.open_shard(split, shard))  # type: ignore[misc]
            else:
                tasks.append(lambda shard=shard, span=span: self._open_member(split, shard, span))  # type: ignore[misc]
        self._prefetcher.replace(tasks)

    def _open_member(self, split: str, shard: ShardInfo, span: Span) -> int:
        name = f"{split}/{shard.name}"

        def fetch(path: Path) -> None:
            path.write_bytes(self._store.read(name, span))

        return self._cache.open(f"{shard.sha256}-{span.offset}", span.size, fetch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _prefetcher=_Prefetcher())


class Store:
    """The files under a URL, with patience: a request that fails is repeated, after ever longer waits."""

    def __init__(self, url: str, retries: Retries) -> None:
        self.url, self._retries = url, retries
        self._scheme = url.partition("://")[0]
        if self._scheme not in _SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise UserError(f"{url} is not a URL that can be read (known: {known})")

    def read(self, name: str, span: Span | None = None) -> bytes:
        """A file, or a part of one, whose size and crc32 are checked.

        Raises:
            DamagedError: it is not there, or the part has another content.
            UserError: no answer, after all attempts.
        """

        def attempt() -> bytes:
            wanted = {} if span is None else {"start": span.offset, "end": span.offset + span.size}
            limit = self._limit(span.size if span else _LARGEST_TABLE)
            try:
                content: bytes = self._filesystem().cat_file(f"{self.url}/{name}", timeout=limit, **wanted)
            except Exception as error:
                if span is not None and _is_beyond_the_end(error):
                    raise _WrongContentError("is cut off: it ends before this member") from None
                raise
            if span is None:
                return content
            if len(content) > span.size:
                raise UserError(
                    f"{self.url} does not serve parts of files: data.cache_gb must be large enough to hold all shards"
                )
            if len(content) < span.size or zlib.crc32(content) != span.crc32:
                raise _WrongContentError("is damaged (its payload's crc32 differs)")
            return content

        return self._persist(name, attempt)

    def fetch(self, name: str, path: Path, size: int, fault: Callable[[], str | None]) -> None:
        """Write a file to `path`; `fault` says what is wrong with it then.

        Raises:
            DamagedError: it is not there, or still has a fault after all attempts.
            UserError: no answer, after all attempts.
        """

        def attempt() -> None:
            self._filesystem().get_file(f"{self.url}/{name}", str(path), timeout=self._limit(size))
            found = fault()
            if found:
                raise _WrongContentError(found)

        self._persist(name, attempt)

    def _persist(self, name: str, attempt: Callable[[], T]) -> T:
        place = f"{self.url}/{name}"
        wrong_answers = 0
        for number in range(self._retries.attempts):
            if number:
                self._retries.wait(self._retries.first_wait * 2 ** (number - 1))
            try:
                return attempt()
            except UserError:
                raise
            except FileNotFoundError:
                raise DamagedError(f"{place} is missing") from None
            except PermissionError as error:
                raise UserError(f"{place} may not be read: {_reason(error)}") from None
            except _WrongContentError as error:
                wrong_answers += 1
                if wrong_answers == _WRONG_ANSWERS:
                    raise DamagedError(f"{place} {error}") from None
                last: Exception = error
            except Exception as error:  # each protocol has exceptions of its own
                if getattr(error, "errno", None) in _DISK_ERRORS:
                    raise
                status = getattr(error, "status", 500)
                if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
                    raise UserError(f"{place} may not be read: {_reason(error)}") from None
                last = error
        raise UserError(f"{place} cannot be read, tried {self._retries.attempts} times: {_reason(last)}")

    def _limit(self, size: int) -> float:
        """Seconds that one attempt may take."""
        return self._retries.attempt_seconds + size / _SLOWEST_BYTES_PER_SECOND

    def _filesystem(self) -> Any:
        try:
            import fsspec

            return fsspec.filesystem(self._scheme, **self._options())
        except ImportError as error:
            raise UserError(
                f"{self.url}: the package {error.name} is missing: pip install 'fastslow-scale[remote]'"
            ) from None

    def _options(self) -> dict[str, Any]:
        """A connection on which nothing comes for the time of an attempt is given up, however large the file."""
        seconds = self._retries.attempt_seconds
        if self._scheme in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
            return {"client_kwargs": {"timeout": timeout}}
        if self._scheme == "s3":
            patience = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
            return {"config_kwargs": patience, "use_listings_cache": False}
        return {}


class _WrongContentError(Exception):
    """The file that came is not the one that was written."""


class _Prefetcher:
    """Fetches in background threads what will soon be read. Its errors are left to whoever then reads."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], int]] = deque()
        self._changed = threading.Condition()
        self._threads = 0

    def replace(self, tasks: Sequence[Callable[[], int]]) -> None:
        """Forget what has not begun; each task gives a descriptor, which is closed."""
        with self._changed:
            self._tasks = deque(tasks)
            self._changed.notify_all()
            while self._threads < min(_PREFETCH_THREADS, len(tasks)):
                self._threads += 1
                threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks)
                task = self._tasks.popleft()
            try:
                os.close(task())
            except Exception:  # whoever reads it will meet the same, and can tell
                continue


def _too_long(path: Path, shard: ShardInfo) -> str | None:
    """More than the room that was made for it."""
    return _fault_of_shard(path, shard) if path.stat().st_size > shard.bytes else None


def _fault_of_shard(path: Path, shard: ShardInfo) -> str | None:
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size} bytes, the manifest says {shard.bytes}"
    if sha256_of(path) != shard.sha256:
        return "is damaged: its sha256 differs from the manifest's"
    return None


def _is_beyond_the_end(error: Exception) -> bool:
    """HTTP's status 416, as each protocol reports it."""
    return getattr(error, "status", None) == 416 or getattr(error, "errno", None) == errno.EINVAL


def _write(path: Path, content: bytes) -> None:
    """Put a small file in its place at once: others may be writing the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"data.cache_dir: {path} cannot be written: {error.strerror}") from None


def _reason(error: Exception) -> str:
    """One line: many errors of connections have no text of their own."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
