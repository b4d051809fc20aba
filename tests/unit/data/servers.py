"""A web server on localhost that can be slow, break off or fail, and a cache to read through."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from data_pipeline.folder import CacheSettings, Retries

Fault = str
"""`500`, `drop` (half the body, then nothing), `stall` (no answer until the server ends), `flip` (one wrong bit),
`drip` (a byte now and then, without end)."""


class FileServer:
    """Serves a folder. `faults` maps the end of a file's name to the faults of its next requests, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: dict[str, list[Fault]] = {}
        self.serves_ranges = True
        self.on_request: Callable[[], None] = lambda: None
        self.requests: list[tuple[str, tuple[int, int] | None]] = []
        """(path below the folder, [first, last] byte or None), in the order of their arrival."""
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def requested(self, ending: str) -> int:
        with self._changed:
            return sum(path.endswith(ending) for path, _ in self.requests)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until requests make the condition true; fails after a long time."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=60)

    def note(self, path: str, span: tuple[int, int] | None) -> Fault | None:
        self.on_request()
        with self._changed:
            self.requests.append((path, span))
            self._changed.notify_all()
            for ending, faults in self.faults.items():
                if path.endswith(ending) and faults:
                    return faults.pop(0)
        return None

    def wait_for_the_end(self) -> None:
        self._ended.wait()

    def has_ended(self, seconds: float) -> bool:
        return self._ended.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, owner: FileServer, *arguments: Any) -> None:
        self._owner = owner
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        given = self.headers.get("Range")
        first, _, last = (given or "").removeprefix("bytes=").partition("-")
        span = (int(first), int(last)) if given else None
        fault = self._owner.note(path, span)
        file = self._owner.folder / path
        if fault == "stall":
            self._owner.wait_for_the_end()
            return
        if fault == "500" or not file.is_file():
            self.send_error(500 if fault == "500" else 404)
            return
        content = file.read_bytes()
        if span and span[0] >= len(content):
            self.send_error(416)
            return
        if span and self._owner.serves_ranges:
            self.send_response(206)
            content = content[span[0] : span[1] + 1]
        else:
            self.send_response(200)
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "drip":
            for byte in content:
                if self._owner.has_ended(0.05):
                    return
                self.wfile.write(bytes([byte]))
        self.wfile.write(content[: len(content) // 2] if fault == "drop" else content)

    def log_message(self, *arguments: object) -> None:
        pass


class Waits:
    """Stands for the clock between attempts: notes how long it should have waited, and does not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def cache_at(
    folder: Path, gigabytes: float = 1.0, attempts: int = 3, attempt_seconds: float = 30.0, waits: Waits | None = None
) -> CacheSettings:
    """A cache whose readers do not wait between attempts."""
    return CacheSettings(folder, gigabytes, Retries(attempts, 0.5, attempt_seconds, waits or Waits()))


def bytes_in(shards: Path) -> int:
    """What a cache takes of the disk, files that are just being written counted with the room made for them."""
    with (shards / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nothing is added, removed or renamed meanwhile
        return sum(
            int(path.name.split(".")[-2]) if path.suffix == ".part" else path.stat().st_size
            for path in shards.iterdir()
        )
