"""Documents -> token ids in one temporary file (the spool), encoded by several processes, in the order of the input."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import UserError
from data_pipeline.index import token_dtype
from data_pipeline.inputs import Document
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.workers import end_with_parent

_BATCH_CHARACTERS = 1 << 20
_BATCHES_AHEAD = 3

SPOOLED_DTYPE = np.dtype(
    [("digest", "V16"), ("offset", "<u8"), ("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8")]
)
"""offset: in tokens from the start of the spool."""


@dataclass(frozen=True)
class Spool:
    """Token ids of all documents one after another, and a record per document."""

    path: Path
    dtype: np.dtype[Any]
    documents: npt.NDArray[Any]

    def tokens(self) -> npt.NDArray[Any]:
        """The whole file, mapped and read-only."""
        if not self.path.stat().st_size:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path, dtype=self.dtype, mode="r")


@dataclass(frozen=True)
class _Encoded:
    tokens: bytes
    records: npt.NDArray[Any]
    num_bytes: int


def encode_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    path: Path,
    workers: int = 1,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Spool:
    """Write the spool to `path`. The result does not depend on `workers`; a few MB of text per worker are in flight.

    `on_bytes` is told the UTF-8 size of the text each time some has been encoded.

    Raises:
        UserError: what `documents` raises; nothing is cleaned up here.
    """
    batches = _batches(documents)
    records: list[npt.NDArray[Any]] = []
    offset = 0
    with path.open("wb") as spool:
        for batch in _encoded_in_order(batches, tokenizer, workers):
            spool.write(batch.tokens)
            batch.records["offset"] += offset
            offset += int(batch.records["tokens"].sum())
            records.append(batch.records)
            on_bytes(batch.num_bytes)
    table = np.concatenate(records) if records else np.empty(0, dtype=SPOOLED_DTYPE)
    return Spool(path, token_dtype(tokenizer.vocab_size), table)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded_in_order(batches: Iterator[list[Document]], tokenizer: Tokenizer, workers: int) -> Iterator[_Encoded]:
    head = list(islice(batches, 2))
    if workers == 1 or len(head) < 2:
        for batch in chain(head, batches):
            yield _encode_batch(batch, tokenizer)
        return
    # spawn: the parent may hold threads (torch, progress) that a forked child would inherit half alive
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.model,)) as pool:
        pending: deque[Future[_Encoded]] = deque()
        try:
            for batch in chain(head, batches):
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) > workers + _BATCHES_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(model: bytes) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer(model)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()


def _encode_in_worker(batch: list[Document]) -> _Encoded:
    return _encode_batch(batch, _worker_tokenizer)


def _encode_batch(batch: list[Document], tokenizer: Tokenizer) -> _Encoded:
    dtype = token_dtype(tokenizer.vocab_size)
    records = np.zeros(len(batch), dtype=SPOOLED_DTYPE)
    tokens: list[bytes] = []
    offset = num_bytes = 0
    for record, document in zip(records, batch, strict=True):
        try:
            ids = np.array(tokenizer.encode(document.text), dtype=dtype)
        except UserError as error:
            raise UserError(f"{document.source}: {error}") from None
        content = document.text.encode("utf-8")
        record["digest"] = np.void(document_digest(content))
        record["offset"], record["tokens"] = offset, len(ids)
        record["bytes"], record["characters"] = len(content), len(document.text)
        tokens.append(ids.tobytes())
        offset += len(ids)
        num_bytes += len(content)
    return _Encoded(b"".join(tokens), records, num_bytes)


def document_digest(content: bytes) -> bytes:
    """16 bytes that stand for a document's text: they decide its split and its place in the shuffle."""
    return hashlib.blake2b(content, digest_size=16).digest()
