"""What a model is evaluated on: the validation split of its run or of another data folder, or plain text files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.cutting import pieces
from data_pipeline.errors import UserError
from data_pipeline.folder import CacheSettings
from data_pipeline.mixture import Data, Mixture, source_name
from data_pipeline.order import Int64s
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import Tokenizer
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.train.batch import open_split
from fastslow_scale.train.checkpoint_files import read_manifest

OTHER_DATA = "evaluate on other data with --data DIR or --text FILE"


@dataclass(frozen=True)
class Rows:
    """N rows of seq_length + 1 tokens, filled up with the padding id, each from one of some sources.

    Attributes:
        location: where they lie, for people.
        seq_length: T.
        names: of the sources.
        source: the number of each row's source, [N].
        read: numbers of rows -> their tokens, int64 [n, T + 1].
    """

    location: str
    seq_length: int
    names: list[str]
    source: Int64s
    read: Callable[[range], torch.Tensor]


def rows_for(loaded: Loaded, folder: str | None, texts: Sequence[str], limit: int | None) -> Rows:
    """What the command's options choose: text files, a data folder, or the run's own data.

    Raises:
        UserError: options that do not go together, and what the functions below raise.
    """
    if texts and folder is not None:
        raise UserError("--data and --text are two choices: give one of them")
    if texts and limit is not None:
        raise UserError("--sequences is for data folders: a --text file is read whole")
    if texts:
        return rows_of_texts(texts, loaded.tokenizer, loaded.config.train.seq_length)
    return rows_of_run(loaded, limit) if folder is None else rows_of_folder(folder, loaded, limit)


def rows_of_run(loaded: Loaded, limit: int | None) -> Rows:
    """The first `limit` sequences of the validation split of the run's own data; None: those that the run validates on.

    Raises:
        UserError: the data is gone or is no longer what the run was trained on.
    """
    config = loaded.config
    if config.data.path is None and not config.data.sources:
        raise UserError(f"{loaded.checkpoint} is an export, which does not say what it was trained on; {OTHER_DATA}")
    try:
        data = open_split(config.data.model_copy(update={"on_error": "stop"}), "validation")
    except UserError as error:
        raise UserError(f"{error}; {OTHER_DATA}") from None
    if data.fingerprint != read_manifest(loaded.checkpoint)["state"].get("data_fingerprint"):
        raise UserError(f"{loaded.checkpoint} was trained on other data than {data.location} now holds; {OTHER_DATA}")
    return _rows_of(data, loaded, limit)


def rows_of_folder(location: str, loaded: Loaded, limit: int | None) -> Rows:
    """The first `limit` sequences of the validation split of a data folder (or its URL).

    Raises:
        UserError: it cannot be read, was encoded by another tokenizer, or has sequences that are too long.
    """
    section = loaded.config.data
    cache = CacheSettings(section.cache_dir, section.cache_gb)
    sha256, context = loaded.tokenizer.sha256, loaded.config.train.seq_length
    data = TokenDataset.open(location, "validation", tokenizer_sha256=sha256, cache=cache)
    if data.seq_length > context:
        raise UserError(
            f"--data {location} was sharded with --seq-len {data.seq_length}, "
            f"more than the trained context (train.seq_length = {context})"
        )
    return _rows_of(data, loaded, limit)


def _rows_of(data: Data, loaded: Loaded, limit: int | None) -> Rows:
    count = min(limit or loaded.config.validation.max_sequences, data.num_samples)
    if isinstance(data, Mixture):
        names, source = data.names, data.sources_of_rows(count)
    else:
        names, source = [source_name(data.location)], np.zeros(count, dtype=np.int64)
    return Rows(f"{data.location}, validation split", data.seq_length, names, source, data.rows)


def rows_of_texts(files: Sequence[str], tokenizer: Tokenizer, seq_length: int) -> Rows:
    """Each file as one document, in windows that do not overlap.

    An end mark stands before the text, so that its first token is predicted, and one behind it, which is predicted too.
    A window's first token is predicted from the last one of the window before, and from nothing else. So every token
    is predicted once, as it is in a data folder.

    Raises:
        UserError: a file that cannot be read, is empty or no UTF-8, or is given twice.
    """
    for name in files:
        if files.count(name) > 1:
            raise UserError(f"--text {name} is given twice")
    parts = [_windows(_read_ids(name, tokenizer), seq_length, tokenizer.pad_id) for name in files]
    source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    whole = np.concatenate(parts)

    def read(numbers: range) -> torch.Tensor:
        return torch.from_numpy(whole[numbers.start : numbers.stop].astype(np.int64))

    return Rows(", ".join(files), seq_length, list(files), source, read)


def _read_ids(name: str, tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """The ids of a file's text between two end marks."""
    try:
        content = Path(name).read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"--text {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"--text {name}:{line}: invalid UTF-8 (byte 0x{content[error.start]:02X})") from None
    if not text:
        raise UserError(f"--text {name} is empty")
    mark = np.array([tokenizer.eos_id], dtype=np.int32)
    ids = np.concatenate([mark, *(tokenizer.encode_piece(piece) for piece in pieces(text)), mark])
    if tokenizer.piece_sizes()[ids].sum() != len(content):
        raise UserError(f"--text {name}: the run's tokenizer alters this text, so its bytes cannot be counted")
    return ids


def _windows(ids: npt.NDArray[np.int32], seq_length: int, pad_id: int) -> npt.NDArray[np.int32]:
    """[n] -> [windows, seq_length + 1]: the first token of each repeats the last one of the window before."""
    count = -(-(len(ids) - 1) // seq_length)
    padded = np.full(count * seq_length + 1, pad_id, dtype=np.int32)
    padded[: len(ids)] = ids
    return padded[np.arange(count)[:, None] * seq_length + np.arange(seq_length + 1)]
