"""Opens an input file as a stream of plain bytes: local or remote, compressed or not, counted as it is read."""

from __future__ import annotations

import gzip
import io
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, TypeVar

from data_pipeline.formats import Compression
from data_pipeline.remote import explain, is_url, open_url

BUFFER_BYTES = 1 << 18
_ZSTD_INPUT_BYTES = 1 << 14
"""Small, because what one call decompresses cannot be bounded otherwise."""

_ZSTD_WINDOW_BYTES = 1 << 31
"""The largest that the format knows: archives made with `zstd --long=31` are common."""


_SECONDS_BEFORE_ATTEMPTS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits after each failed attempt to read from a server, before the next one."""

T = TypeVar("T")


class DamagedData(Exception):
    """Compressed data that cannot be decompressed."""


STREAM_ERRORS = (OSError, EOFError, zlib.error, DamagedData)
"""What reading a stream may raise. `gzip.BadGzipFile` is an OSError."""


def explain_stream_error(error: BaseException) -> tuple[str, str]:
    """(kind, message) of one of `STREAM_ERRORS`."""
    if isinstance(error, EOFError):
        return "truncated file", "the compressed data ends early: the file is cut off"
    if isinstance(error, gzip.BadGzipFile | zlib.error | DamagedData):
        return "damaged file", f"the compressed data is damaged: {explain(error)}"
    assert isinstance(error, OSError)
    return "unreadable file", f"cannot be read: {error.strerror or explain(error)}"


@contextmanager
def open_stream(
    name: str, compression: Compression, on_read: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[io.BufferedReader]:
    """Yield the decompressed bytes of a path or URL. `on_read` is told how many bytes of the file itself were read.

    Raises:
        OSError: the file cannot be opened. Reading raises one of `STREAM_ERRORS`.
    """
    with ExitStack() as stack:
        raw = _Remote(name) if is_url(name) else open(name, "rb", buffering=0)  # noqa: SIM115
        stack.enter_context(raw)
        counted = _Counted(raw, on_read)
        if compression == "gzip":
            unpacked: Any = gzip.GzipFile(fileobj=io.BufferedReader(counted, BUFFER_BYTES), mode="rb")
        elif compression == "zstd":
            unpacked = _Zstd(counted)
        else:
            unpacked = counted
        yield stack.enter_context(io.BufferedReader(unpacked, BUFFER_BYTES))


class _Counted(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, on_read: Callable[[int], None]) -> None:
        self._raw = raw
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self._on_read(count)
        return count


class _Remote(io.RawIOBase):
    """A file behind a URL. After an error it is opened anew, a few times with longer and longer waits between."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._file: BinaryIO | None = None
        self._file = self._again_and_again(self._opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._again_and_again(lambda: self._opened().seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._again_and_again(lambda: self._opened().read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._forget()
        super().close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = open_url(self._url)
            if self._position:
                self._file.seek(self._position)
        return self._file

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _again_and_again(self, attempt: Callable[[], T]) -> T:
        for seconds in (*_SECONDS_BEFORE_ATTEMPTS, None):
            try:
                return attempt()
            except Exception as error:  # each protocol has its own, and "not found" may stand for a server in trouble
                self._forget()
                if seconds is None:
                    raise OSError(f"{explain(error)} ({len(_SECONDS_BEFORE_ATTEMPTS) + 1} attempts)") from None
            time.sleep(seconds)
        raise AssertionError


class _Zstd(io.RawIOBase):
    """All frames of a zstd file. The library's own reader takes a file that was cut off for one that ends."""

    def __init__(self, file: io.RawIOBase) -> None:
        import zstandard

        self._file = file
        self._library = zstandard
        self._frame: Any = None
        self._input = self._output = b""
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._position == len(self._output):
            if not self._input:
                self._input = self._file.read(_ZSTD_INPUT_BYTES) or b""
                if not self._input:
                    if self._frame is not None:
                        raise EOFError
                    return 0
            self._output, self._position = self._decompress(), 0
        count = min(len(buffer), len(self._output) - self._position)
        buffer[:count] = self._output[self._position : self._position + count]
        self._position += count
        return count

    def _decompress(self) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        try:
            output: bytes = self._frame.decompress(self._input)
        except self._library.ZstdError as error:
            raise DamagedData(explain(error)) from None
        self._input = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return output
