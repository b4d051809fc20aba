"""Opens an input file as a stream of plain bytes: local or remote, compressed or not, counted as it is read."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

from data_pipeline.formats import Compression
from data_pipeline.remote import explain, is_url, open_url

BUFFER_BYTES = 1 << 18
_ZSTD_INPUT_BYTES = 1 << 14
"""Small, because what one call decompresses cannot be bounded otherwise."""

_ZSTD_WINDOW_BYTES = 1 << 31
"""The largest that the format knows: archives made with `zstd --long=31` are common."""


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
        raw = open_url(name) if is_url(name) else open(name, "rb", buffering=0)  # noqa: SIM115
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
    def __init__(self, raw: BinaryIO | io.FileIO, on_read: Callable[[int], None]) -> None:
        self._raw: Any = raw
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._raw.readinto(buffer) or 0
        except OSError:
            raise
        except Exception as error:  # a store's own kinds
            raise OSError(explain(error)) from None
        self._on_read(count)
        return int(count)


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
