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
    stream = _TokenStream(dataset)
    for number, num_tokens in enumerate(table["tokens"].tolist()):
        ids = stream.take(num_tokens + 1)
        if len(ids) != num_tokens + 1 or ids[-1] != dataset.eos_id or dataset.eos_id in ids[:-1]:
            raise UserError(f"{dataset.path}: document {number} of the {split} split does not end where it is recorded")
        yield tokenizer.decode(ids[:-1].tolist())


class _TokenStream:
    """The targets of all rows one after another: the corpus as it was packed."""

    def __init__(self, dataset: TokenDataset) -> None:
        self._dataset = dataset
        self._next_row = 0
        self._rest = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` tokens, fewer at the end."""
        parts, size = [self._rest], len(self._rest)
        step = self._dataset.manifest.rows_per_member
        while size < count and self._next_row < self._dataset.num_samples:
            end = min(self._next_row + step, self._dataset.num_samples)
            parts.append(self._dataset.rows(range(self._next_row, end))[:, 1:].numpy().ravel())
            size += len(parts[-1])
            self._next_row = end
        tokens = np.concatenate(parts)
        self._rest = tokens[count:]
        return tokens[:count]
