"""Decodes the documents of a data folder, in the order in which they were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import UserError
from data_pipeline.index import DOCUMENT_DTYPE, DOCUMENTS_NAME, load_table
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import Tokenizer


def iter_documents(path: Path | str, split: str = "train", tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Decode the documents of a split in their recorded order.

    Raises:
        UserError: damaged data, or a stream that does not hold the recorded documents.
    """
    dataset = TokenDataset.open(path, split)
    if tokenizer is None:
        tokenizer = Tokenizer.load(dataset.tokenizer_path)
    if tokenizer.sha256 != dataset.tokenizer_sha256:
        raise UserError(f"{dataset.path} was encoded by another tokenizer than {dataset.tokenizer_path}")
    info = dataset.manifest.split(split, dataset.path)
    table = load_table(dataset.path / split / DOCUMENTS_NAME, info.documents_sha256, DOCUMENT_DTYPE)
    for number, ids in enumerate(_documents_of(dataset, table["tokens"].astype(np.int64) + 1)):
        if not len(ids) or ids[-1] != dataset.eos_id or dataset.eos_id in ids[:-1]:
            raise UserError(f"{dataset.path}: document {number} of the {split} split does not end where it is recorded")
        yield tokenizer.decode(ids[:-1].tolist())


def _documents_of(dataset: TokenDataset, targets: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """The targets of each document, fewer where the rows end too early.

    Concatenated documents stand one after another. With best fit the whole rows of all documents come first, and what
    is left of each stands in the rows behind, in the same order.
    """
    if dataset.manifest.build.get("packing") != "best-fit":
        stream = _TargetStream(dataset, 0, dataset.num_samples)
        yield from map(stream.take, targets.tolist())
        return
    length = dataset.seq_length
    first_mixed = int((targets // length).sum())
    wholes = _TargetStream(dataset, 0, min(first_mixed, dataset.num_samples))
    rests = _TargetStream(dataset, first_mixed, dataset.num_samples, skip=dataset.pad_id)
    for count in targets.tolist():
        yield np.concatenate((wholes.take(count // length * length), rests.take(count % length)))


class _TargetStream:
    """The targets of some rows one after another."""

    def __init__(self, dataset: TokenDataset, start: int, stop: int, skip: int | None = None) -> None:
        self._dataset = dataset
        self._next_row, self._stop = start, stop
        self._skip = skip
        self._rest = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` targets, fewer at the end; those that equal `skip` are passed over."""
        parts, size = [self._rest], len(self._rest)
        step = self._dataset.manifest.rows_per_member
        while size < count and self._next_row < self._stop:
            end = min(self._next_row + step, self._stop)
            found = self._dataset.rows(range(self._next_row, end))[:, 1:].numpy().ravel()
            parts.append(found if self._skip is None else found[found != self._skip])
            size += len(parts[-1])
            self._next_row = end
        tokens = np.concatenate(parts)
        self._rest = tokens[count:]
        return tokens[:count]
