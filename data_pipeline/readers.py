"""From an input file to its documents, each checked to be text that survives a round trip; faults come as values."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.faults import Fault, OnFault, stop_at
from data_pipeline.formats import Compression
from data_pipeline.inputs import InputFile
from data_pipeline.streams import STREAM_ERRORS, explain_stream_error, open_stream

_BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 64

OnRead = Callable[[int], None]


@dataclass(frozen=True)
class Document:
    """One document, or a stretch of a long one, and where it came from."""

    text: str
    source: str
    """FILE, FILE:LINE or FILE:row NUMBER."""
    continues: bool = False
    """The next item goes on with this document."""


@dataclass(frozen=True)
class Extent:
    """A part of a file that is read for itself: bytes of a .jsonl (lines that begin there), row groups of a .parquet.

    `stop` None: to the end.
    """

    file: InputFile
    start: int = 0
    stop: int | None = None


Item = Document | Fault
"""A fault after a document that `continues` takes that document with it."""


def read_extent(extent: Extent, text_field: str = "text", on_read: OnRead = lambda num_bytes: None) -> Iterator[Item]:
    """Yield the documents of (a part of) a file, and a `Fault` in the place of each that cannot be used.

    Memory is bounded for text files of any size; a JSON or Parquet row is held whole. `on_read` is told of the bytes
    read from the file.
    """
    kind = extent.file.format.kind
    name = extent.file.name
    try:
        with open_stream(name, extent.file.format.compression, on_read) as stream:
            if kind == "text":
                yield from _read_text(stream, name)
            elif kind == "rows":
                yield from _read_rows(stream, extent, text_field)
            else:
                yield from _read_table(stream, extent, text_field)
    except STREAM_ERRORS as error:
        fault, message = explain_stream_error(error)
        yield Fault(fault, name, message)


def read_documents(
    files: Iterable[InputFile],
    text_field: str = "text",
    on_fault: OnFault = stop_at,
    on_read: OnRead = lambda num_bytes: None,
) -> Iterator[Document]:
    """Yield every document of every file, each whole, in the order of the files.

    Raises:
        UserError: at the first fault, naming file and line, unless `on_fault` does something else with it.
    """
    for file in files:
        stretches: list[str] = []
        for item in read_extent(Extent(file), text_field, on_read):
            if isinstance(item, Fault):
                stretches = []
                on_fault(item)
                continue
            stretches.append(item.text)
            if not item.continues:
                yield Document(stretches[0] if len(stretches) == 1 else "".join(stretches), item.source)
                stretches = []


def _read_text(stream: io.BufferedReader, name: str) -> Iterator[Item]:
    """The whole file is one document, its line ends and byte-order mark untouched."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, line, at_end = "", 1, False
    while not at_end:
        try:
            block = stream.read(_BLOCK_BYTES)
            at_end = not block
            text = decoder.decode(block, final=at_end)
        except STREAM_ERRORS as error:
            kind, message = explain_stream_error(error)
            yield Fault(kind, f"{name}:{line}", message)
            return
        except UnicodeDecodeError as error:
            yield _invalid(error, name, line)
            return
        line += block.count(b"\n")
        if text:
            if held:
                yield Document(held, name, continues=True)
            held = text
    yield Document(held, name) if held else Fault("empty file", name, "the file is empty")


def _invalid(error: UnicodeDecodeError, name: str, first_line: int) -> Fault:
    line = first_line + error.object.count(b"\n", 0, error.start)
    return Fault("invalid UTF-8", f"{name}:{line}", f"invalid UTF-8 (byte 0x{error.object[error.start]:02X})")


def _read_rows(stream: io.BufferedReader, extent: Extent, text_field: str) -> Iterator[Item]:
    """One JSON object a line; lines of nothing but white space hold no row."""
    name, position, number, num_rows = extent.file.name, 0, 0, 0
    if extent.start:
        # a line belongs to the extent in which its first byte lies
        stream.seek(extent.start - 1)
        position = extent.start - 1 + len(stream.readline())
    while extent.stop is None or position < extent.stop:
        number += 1
        try:
            line = stream.readline()
        except STREAM_ERRORS as error:
            kind, message = explain_stream_error(error)
            yield Fault(kind, f"{name}:{number}", message)
            return
        if not line:
            break
        if line.strip():
            num_rows += 1
            item = _document_of_row(line, f"{name}:{number}", text_field)
            if isinstance(item, Fault) and extent.start:
                number_in_file = number + _lines_before(name, extent.file.format.compression, extent.start)
                item = Fault(item.kind, f"{name}:{number_in_file}", item.message)
            yield item
        position += len(line)
    if not num_rows and not extent.start and extent.stop is None:
        fault = ("empty file", "the file holds no rows" if position else "the file is empty")
        yield Fault(fault[0], name, fault[1])


def _lines_before(name: str, compression: Compression, position: int) -> int:
    """Lines that begin before a byte: counted only where a fault must be named."""
    count = left = 0
    with open_stream(name, compression) as stream:
        left = position - 1
        while left and (block := stream.read(min(left, _BLOCK_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count + 1


def _document_of_row(line: bytes, place: str, text_field: str) -> Item:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault("invalid UTF-8", place, f"invalid UTF-8 (byte 0x{line[error.start]:02X})")
    except (ValueError, RecursionError) as error:
        return Fault("broken JSON", place, f"not a JSON row: {error}")
    if not isinstance(row, dict):
        return Fault("row without text", place, f"the row must be a JSON object (got {type(row).__name__})")
    if text_field not in row:
        fields = ", ".join(str(name) for name in list(row)[:8]) or "none"
        message = f"the row has no field {text_field!r} (it has: {fields}); name it with --text-field"
        return Fault("row without text", place, message)
    text = row[text_field]
    if not isinstance(text, str):
        return Fault("row without text", place, f"field {text_field!r} must be text (got {type(text).__name__})")
    if not text:
        return Fault("empty document", place, f"field {text_field!r} is empty")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return Fault("lone surrogate", place, f"field {text_field!r} holds a lone surrogate, which is not text")
    return Document(text, place)


def _read_table(stream: io.BufferedReader, extent: Extent, text_field: str) -> Iterator[Item]:
    """A document a row of a Parquet file, read page by page."""
    import pyarrow
    import pyarrow.parquet

    name = extent.file.name
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(stream, buffer_size=_BLOCK_BYTES, pre_buffer=False)
        schema = table.schema_arrow
        if text_field not in schema.names:
            fields = ", ".join(schema.names[:8]) or "none"
            message = f"the table has no column {text_field!r} (it has: {fields}); name it with --text-field"
            yield Fault("row without text", name, message)
            return
        if not _holds_text(pyarrow, schema.field(text_field).type):
            type_name = schema.field(text_field).type
            yield Fault("row without text", name, f"column {text_field!r} must be text (got {type_name})")
            return
        groups = range(extent.start, table.num_row_groups if extent.stop is None else extent.stop)
        if not table.metadata.num_rows:
            yield Fault("empty file", name, "the file holds no rows")
        number = sum(table.metadata.row_group(group).num_rows for group in range(extent.start))
        for batch in table.iter_batches(_ROWS_PER_BATCH, list(groups), [text_field], use_threads=False):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for value in column.cast(pyarrow.large_binary()):
                number += 1
                yield _document_of_value(value.as_py(), f"{name}:row {number}", text_field)
    except (pyarrow.ArrowException, OSError) as error:
        place = f"{name}:row {number + 1}" if number else name
        yield Fault("damaged file", place, f"the Parquet data cannot be read: {' '.join(str(error).split())}")


def _holds_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _document_of_value(value: bytes | None, place: str, text_field: str) -> Item:
    if value is None:
        return Fault("row without text", place, f"column {text_field!r} is null")
    if not value:
        return Fault("empty document", place, f"column {text_field!r} is empty")
    try:
        return Document(value.decode("utf-8"), place)
    except UnicodeDecodeError as error:
        return Fault("invalid UTF-8", place, f"invalid UTF-8 (byte 0x{value[error.start]:02X})")
