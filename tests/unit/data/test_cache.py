"""The cache: bounded at every moment, shared by threads and processes, and left whole by a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from data_pipeline.cache import Cache
from data_pipeline.errors import UserError
from tests.unit.data.servers import bytes_in

pytestmark = pytest.mark.unit


def writes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def never(path: Path) -> None:
    raise AssertionError(f"{path} was fetched")


def read(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def names(cache: Cache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()} - {".lock"}


def test_an_entry_is_fetched_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 100)
    assert read(cache.open("a", 3, writes(b"abc"))) == b"abc"
    assert read(cache.open("a", 3, never)) == b"abc"
    assert read(Cache(tmp_path / "cache", 100).open("a", 3, never)) == b"abc"


def test_what_was_not_used_for_the_longest_time_goes(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 30)
    for second, name in enumerate("abc"):
        os.close(cache.open(name, 10, writes(b"x" * 10)))
        os.utime(tmp_path / name, (1000 + second, 1000 + second))
    os.close(cache.open("a", 10, never))  # used again: now b is the oldest
    os.close(cache.open("d", 10, writes(b"x" * 10)))
    assert names(cache) == {"a", "c", "d"}


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 30, seconds_for_room=0.1)
    held = [cache.open(name, 10, writes(name.encode() * 10)) for name in "abc"]
    os.close(held.pop())
    held.append(cache.open("c", 10, never))  # found there: as much in use as what was just fetched
    with pytest.raises(UserError, match="are too few: all of it is in use"):
        cache.open("d", 10, never)
    assert names(cache) == {"a", "b", "c"}
    assert read(held[1]) == b"b" * 10
    assert read(cache.open("d", 10, writes(b"d" * 10))) == b"d" * 10
    assert names(cache) == {"a", "c", "d"}
    for descriptor in (held[0], held[2]):
        os.close(descriptor)


def test_an_entry_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.cache_gb: a takes 3\.1e-08 GB, all of the cache may take 3e-08 GB"):
        Cache(tmp_path, 30).open("a", 31, never)


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 30)

    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise UserError("gone")

    with pytest.raises(UserError, match="gone"):
        cache.open("a", 10, fails)
    assert names(cache) == set()
    assert read(cache.open("a", 3, writes(b"abc"))) == b"abc"


def test_room_is_promised_before_it_is_filled(tmp_path: Path) -> None:
    """While an entry of 20 bytes is being fetched, one of 20 must wait, and one of 10 need not."""
    cache = Cache(tmp_path, 30)
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        path.write_bytes(b"s" * 20)

    thread = threading.Thread(target=lambda: os.close(cache.open("slow", 20, slow)))
    thread.start()
    assert begun.wait(60)
    impatient = Cache(tmp_path, 30, seconds_for_room=0)
    with pytest.raises(UserError, match="all of it is in use"):
        impatient.open("large", 20, never)
    assert read(impatient.open("small", 10, writes(b"x" * 10))) == b"x" * 10
    go_on.set()
    thread.join()
    assert names(cache) == {"slow", "small"}


def test_many_threads_never_exceed_the_bound(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 50)
    taken: list[int] = []
    wrong: list[str] = []

    def fetch(number: int, path: Path) -> None:
        path.write_bytes(bytes([number]) * 10)
        taken.append(bytes_in(tmp_path))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            number = rng.randrange(12)
            if read(cache.open(str(number), 10, lambda path: fetch(number, path))) != bytes([number]) * 10:  # noqa: B023
                wrong.append(str(number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 12 < len(taken) < 240, "entries were evicted and fetched again, and shared"
    assert max(taken) == 50


FETCHER = """
import os, sys
from pathlib import Path
from data_pipeline.cache import Cache

def fetch(path):
    path.write_bytes(b"half")
    print("begun", flush=True)
    sys.stdin.readline()
    path.write_bytes(b"whole")

os.close(Cache(Path(sys.argv[1]), 100).open("a", 5, fetch))
print("ended", flush=True)
sys.stdin.readline()
"""


def fetcher(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", FETCHER, str(folder)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    with fetcher(tmp_path) as other:
        answers: list[bytes] = []
        waiter = threading.Thread(target=lambda: answers.append(read(Cache(tmp_path, 100).open("a", 5, never))))
        waiter.start()
        other.communicate("\n")
        waiter.join()
    assert answers == [b"whole"]


def test_a_process_that_is_killed_while_it_fetches_is_replaced(tmp_path: Path) -> None:
    with fetcher(tmp_path) as other:
        other.kill()
    assert names(Cache(tmp_path, 100)) == {"a.5.part"}
    assert read(Cache(tmp_path, 9).open("b", 5, writes(b"bbbbb"))) == b"bbbbb", "its room is free again"
    assert names(Cache(tmp_path, 9)) == {"b"}
    with fetcher(tmp_path) as other:
        other.kill()
    assert read(Cache(tmp_path, 100).open("a", 5, writes(b"whole"))) == b"whole"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache_dir .*file/cache cannot be written: Not a directory"):
        Cache(tmp_path / "file" / "cache", 10)


def test_locks_are_those_that_nfs_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes locks of byte ranges of them: exclusive ones need a file that is open for writing (flock(2))."""
    real = fcntl.flock

    def of_nfs(lock: IO[bytes] | int, kind: int) -> None:
        mode = fcntl.fcntl(lock, fcntl.F_GETFL) & os.O_ACCMODE
        if (kind & fcntl.LOCK_EX and mode == os.O_RDONLY) or (kind & fcntl.LOCK_SH and mode == os.O_WRONLY):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(lock, kind)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    cache = Cache(tmp_path, 10, 0.0)
    assert read(cache.open("a", 6, writes(b"aaaaaa"))) == b"aaaaaa"
    assert read(cache.open("b", 6, writes(b"bbbbbb"))) == b"bbbbbb"
    assert names(cache) == {"b"}


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(lock: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"cannot be locked: Function not implemented; it must be on a disk of this"):
        Cache(tmp_path, 10, 0.0)
