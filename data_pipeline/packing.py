"""Which documents go into which split, in which order, and how their tokens fill rows of one length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.encode import Spool
from data_pipeline.order import Int64s, derive_key, splitmix64

_COPY_TOKENS = 1 << 22


def split_and_shuffle(digests: npt.NDArray[Any], validation_fraction: float, seed: int) -> tuple[Int64s, Int64s]:
    """Indices of the training and of the validation documents, each in shuffled order.

    The digest alone decides a document's split: copies of it never stand on both sides, and no seed moves it. With two
    different documents and a fraction above 0, both splits get at least one.

    Args:
        digests: [n] of 16 bytes each. The order in which they come does not matter.
    """
    words = np.frombuffer(digests.tobytes(), dtype="<u8").reshape(-1, 2)
    lot, shuffle_key = words[:, 0], splitmix64(words[:, 1] ^ np.uint64(derive_key(seed)))
    shuffled = np.lexsort((lot, shuffle_key))
    if validation_fraction <= 0 or not len(lot) or lot.min() == lot.max():
        return shuffled, shuffled[:0]
    threshold = min(max(int(validation_fraction * 2.0**64), int(lot.min()) + 1), int(lot.max()))
    held_out = (lot < np.uint64(threshold))[shuffled]
    return shuffled[~held_out], shuffled[held_out]


def pack_rows(
    spool: Spool, documents: Int64s, seq_length: int, eos_id: int, pad_id: int, rows_per_block: int
) -> Iterator[npt.NDArray[Any]]:
    """Concatenate documents, an end-of-document id after each, and cut the stream into rows.

    A row holds seq_length + 1 tokens; its first repeats the last of the row before it, and the first row of all begins
    with an end-of-document id. So each token of the stream is the target (row[1:]) of exactly one row. The last row is
    filled with `pad_id`.

    Yields:
        [rows_per_block, seq_length + 1] arrays in the spool's dtype, the last one with fewer rows.
    """
    block_targets = rows_per_block * seq_length
    carry = np.full(1, eos_id, dtype=spool.dtype)
    for stretch in _stretches(spool, documents, eos_id):
        stream = np.concatenate((carry, stretch))
        done = 0
        while len(stream) - done > block_targets:
            yield _rows(stream[done : done + block_targets + 1], seq_length)
            done += block_targets
        carry = stream[done:].copy()
    if len(carry) > 1:
        missing = -(len(carry) - 1) % seq_length
        yield _rows(np.concatenate((carry, np.full(missing, pad_id, dtype=spool.dtype))), seq_length)


def _stretches(spool: Spool, documents: Int64s, eos_id: int) -> Iterator[npt.NDArray[Any]]:
    """The token stream in pieces of a few million tokens, so that many small documents cost one copy together."""
    tokens = spool.tokens()
    end = np.full(1, eos_id, dtype=spool.dtype)
    parts: list[npt.NDArray[Any]] = []
    size = 0
    for record in spool.documents[documents]:
        start, stop = int(record["offset"]), int(record["offset"] + record["tokens"])
        for piece_start in range(start, stop, _COPY_TOKENS):
            parts.append(tokens[piece_start : min(stop, piece_start + _COPY_TOKENS)])
            size += len(parts[-1])
            if size >= _COPY_TOKENS:
                yield np.concatenate(parts)
                parts, size = [], 0
        parts.append(end)
        size += 1
    if parts:
        yield np.concatenate(parts)


def _rows(stream: npt.NDArray[Any], seq_length: int) -> npt.NDArray[Any]:
    """[n * seq_length + 1] -> [n, seq_length + 1], neighbours sharing one token."""
    view = np.lib.stride_tricks.sliding_window_view(stream, seq_length + 1)[::seq_length]
    return np.ascontiguousarray(view)
