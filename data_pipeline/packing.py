"""Which documents go into which split, in which order, and how their tokens fill rows of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_pipeline.best_fit import fill_bins
from data_pipeline.order import Int64s, derive_key, splitmix64
from data_pipeline.spool import Spool

Packing = Literal["concat", "best-fit"]
Blocks = Iterator[npt.NDArray[Any]]

_COPY_TOKENS = 1 << 22


@dataclass(frozen=True)
class RowFormat:
    """Rows hold seq_length + 1 tokens; blocks of rows become the members of a shard."""

    seq_length: int
    eos_id: int
    pad_id: int
    rows_per_block: int


def split_and_shuffle(
    digests: npt.NDArray[Any], validation_fraction: float, seed: int, *, dedup: bool = False
) -> tuple[Int64s, Int64s]:
    """Indices of the training and of the validation documents, each in shuffled order.

    The digest alone decides a document's split: copies of it never stand on both sides, and no seed moves it. With two
    different documents and a fraction above 0, both splits get at least one.

    Args:
        digests: [n] of 16 bytes each. The order in which they come does not matter.
        dedup: leave out all copies of a document but one.
    """
    words = np.frombuffer(digests.tobytes(), dtype="<u8").reshape(-1, 2)
    lot, shuffle_key = words[:, 0], splitmix64(words[:, 1] ^ np.uint64(derive_key(seed)))
    shuffled = np.lexsort((lot, shuffle_key))
    if dedup and len(shuffled):
        # splitmix64 is a bijection, so copies, and only they, are neighbours with both words equal
        first, second = shuffled[:-1], shuffled[1:]
        is_copy = (lot[first] == lot[second]) & (shuffle_key[first] == shuffle_key[second])
        shuffled = np.concatenate((shuffled[:1], second[~is_copy]))
    if validation_fraction <= 0 or not len(lot) or lot.min() == lot.max():
        return shuffled, shuffled[:0]
    threshold = min(max(int(validation_fraction * 2.0**64), int(lot.min()) + 1), int(lot.max()))
    held_out = (lot < np.uint64(threshold))[shuffled]
    return shuffled[~held_out], shuffled[held_out]


def pack(spool: Spool, documents: Int64s, packing: Packing, rows: RowFormat) -> tuple[Int64s, Blocks]:
    """The documents in the order in which they can be read back, and the rows in blocks.

    Yields:
        [rows_per_block, seq_length + 1] arrays in the spool's dtype, the last one with fewer rows.
    """
    packers: dict[Packing, Callable[[Spool, Int64s, RowFormat], tuple[Int64s, Blocks]]] = {
        "concat": lambda *arguments: (documents, _concatenate(*arguments)),
        "best-fit": _best_fit,
    }
    return packers[packing](spool, documents, rows)


def _concatenate(spool: Spool, documents: Int64s, rows: RowFormat) -> Blocks:
    """Concatenate documents, an end-of-document id after each, and cut the stream into rows.

    The first token of a row repeats the last of the row before it, and the first row of all begins with an
    end-of-document id. So each token of the stream is the target (row[1:]) of exactly one row. The last row is filled
    with `pad_id`.
    """
    block_targets = rows.rows_per_block * rows.seq_length
    carry = np.full(1, rows.eos_id, dtype=spool.dtype)
    for stretch in _stretches(spool, documents, rows.eos_id):
        stream = np.concatenate((carry, stretch))
        done = 0
        while len(stream) - done > block_targets:
            yield _overlapping(stream[done : done + block_targets + 1], rows.seq_length)
            done += block_targets
        carry = stream[done:].copy()
    if len(carry) > 1:
        missing = -(len(carry) - 1) % rows.seq_length
        filling = np.full(missing, rows.pad_id, dtype=spool.dtype)
        yield _overlapping(np.concatenate((carry, filling)), rows.seq_length)


def _stretches(spool: Spool, documents: Int64s, eos_id: int) -> Blocks:
    """The token stream in pieces of a few million tokens, so that many small documents cost one copy together."""
    end = np.full(1, eos_id, dtype=spool.dtype)
    parts: list[npt.NDArray[Any]] = []
    size = 0
    for document, num_tokens in zip(documents.tolist(), spool.documents["tokens"][documents].tolist(), strict=True):
        for start in range(0, num_tokens, _COPY_TOKENS):
            parts.append(spool.read(document, start, min(num_tokens - start, _COPY_TOKENS)))
            size += len(parts[-1])
            if size >= _COPY_TOKENS:
                yield np.concatenate(parts)
                parts, size = [], 0
        parts.append(end)
        size += 1
    if parts:
        yield np.concatenate(parts)


def _overlapping(stream: npt.NDArray[Any], seq_length: int) -> npt.NDArray[Any]:
    """[n * seq_length + 1] -> [n, seq_length + 1], neighbours sharing one token."""
    view = np.lib.stride_tricks.sliding_window_view(stream, seq_length + 1)[::seq_length]
    return np.ascontiguousarray(view)


def _best_fit(spool: Spool, documents: Int64s, rows: RowFormat) -> tuple[Int64s, Blocks]:
    """Rows of whole documents.

    A document with its end mark has tokens + 1 targets. As many whole rows as these fill come first, for all documents
    in order; what is left of each (the whole of it, where it is shorter than a row) is put with others into rows by
    best fit, padded at the end. The documents are reordered: the rests stand in that order in their rows.
    """
    targets = spool.documents["tokens"][documents].astype(np.int64) + 1
    rests = targets % rows.seq_length
    bins = fill_bins(rests, rows.seq_length)
    without_rest = np.flatnonzero(rests == 0)
    order = documents[np.concatenate((bins.items, without_rest))]
    return order, _in_blocks(_best_fit_rows(spool, order, bins.starts, rows), rows.rows_per_block)


def _best_fit_rows(spool: Spool, order: Int64s, starts: Int64s, rows: RowFormat) -> Blocks:
    """starts: [bins + 1], where the documents of each bin begin in `order`."""
    length = rows.seq_length

    def target(document: int, num_tokens: int, start: int, count: int) -> npt.NDArray[Any]:
        """Targets start .. start + count - 1 of a document; the one behind its tokens is its end mark."""
        tokens = spool.read(document, start, min(count, num_tokens - start))
        return tokens if len(tokens) == count else np.append(tokens, spool.dtype.type(rows.eos_id))

    for document in order.tolist():
        num_tokens = int(spool.documents["tokens"][document])
        for start in range(0, (num_tokens + 1) // length * length, length):
            row = np.empty(length + 1, dtype=spool.dtype)
            row[0] = spool.read(document, start - 1, 1)[0] if start else rows.eos_id
            row[1:] = target(document, num_tokens, start, length)
            yield row
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        row = np.full(length + 1, rows.pad_id, dtype=spool.dtype)
        row[0] = rows.eos_id
        filled = 1
        for document in order[first:last].tolist():
            num_tokens = int(spool.documents["tokens"][document])
            count = (num_tokens + 1) % length
            start = num_tokens + 1 - count
            if start and filled == 1:
                row[0] = spool.read(document, start - 1, 1)[0]
            row[filled : filled + count] = target(document, num_tokens, start, count)
            filled += count
        yield row


def _in_blocks(rows: Blocks, rows_per_block: int) -> Blocks:
    block: list[npt.NDArray[Any]] = []
    for row in rows:
        block.append(row)
        if len(block) == rows_per_block:
            yield np.stack(block)
            block = []
    if block:
        yield np.stack(block)
