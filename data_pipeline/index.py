"""What a data folder says about itself: the manifest (counts, hashes) and, per split, where each member lies.

    DIR/manifest.json
    DIR/tokenizer.model
    DIR/SPLIT/shard-000000.tar ...   webdataset shards; a member KEY.bin holds up to 64 rows of seq_length + 1 tokens
    DIR/SPLIT/index.npy              one record per member
    DIR/SPLIT/documents.npy          one record per document, in the order of the rows

The folder is self-contained: it can be moved or copied as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import UserError
from data_pipeline.files import write_durably

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.npy"
DOCUMENTS_NAME = "documents.npy"
SPLITS = ("train", "validation")
ROWS_PER_MEMBER = 64

INDEX_DTYPE = np.dtype([("shard", "<u4"), ("rows", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("crc32", "<u4")])
"""offset and size: the payload's bytes within the shard, header not included."""

DOCUMENT_DTYPE = np.dtype([("digest", "V16"), ("tokens", "<u8")])
"""digest: blake2b of the text's UTF-8; tokens: its length without the end-of-document id."""


def member_key(member: int) -> str:
    return f"{member:09d}"


def member_name(member: int) -> str:
    """Name of a member within its shard; `member` counts through all shards of a split."""
    return f"{member_key(member)}.bin"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class ShardInfo:
    name: str
    bytes: int
    sha256: str
    members: int


@dataclass(frozen=True)
class SplitInfo:
    """Counts of one split. `tokens` has each token of the corpus once, end-of-document ids included."""

    documents: int
    tokens: int
    bytes: int
    characters: int
    rows: int
    index_sha256: str
    documents_sha256: str
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything a reader must know. Two folders with the same manifest hold the same rows."""

    seq_length: int
    dtype: str
    vocab_size: int
    eos_id: int
    pad_id: int
    tokenizer_sha256: str
    rows_per_member: int
    build: dict[str, Any]
    """What the folder was made from: seed, validation fraction and the like, for people and for `data demo`."""
    splits: dict[str, SplitInfo]
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over the content; every file of the folder is hashed in it."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        content = {**dataclasses.asdict(self), "fingerprint": self.fingerprint}
        write_durably(folder / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check.

        Raises:
            UserError: no such folder, not a data folder, damaged or edited, or of another format version.
        """
        path = folder / MANIFEST_NAME
        if not folder.is_dir():
            raise UserError(f"data folder {folder} does not exist")
        if not path.is_file():
            raise UserError(f"{folder} is not a data folder: it has no {MANIFEST_NAME}")
        try:
            content = json.loads(path.read_bytes())
            version = content["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path} is damaged: not the JSON of a manifest") from None
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
        try:
            fingerprint = content.pop("fingerprint")
            content["splits"] = {name: _split_info(split) for name, split in content["splits"].items()}
            manifest = cls(**content)
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged: not the fields of a manifest") from None
        if manifest.fingerprint != fingerprint:
            raise UserError(f"{path} was changed after it was written: its content does not match its fingerprint")
        return manifest

    def split(self, name: str, folder: Path) -> SplitInfo:
        """Raises `UserError` for a split that the folder lacks or that is empty."""
        info = self.splits.get(name)
        if info is None:
            raise UserError(f"{folder} has no split {name!r} (it has: {', '.join(self.splits)})")
        if not info.rows:
            raise UserError(f"{folder}: the {name} split is empty")
        return info


def _split_info(content: dict[str, Any]) -> SplitInfo:
    return SplitInfo(**{**content, "shards": tuple(ShardInfo(**shard) for shard in content["shards"])})


def save_table(path: Path, table: npt.NDArray[Any]) -> str:
    """Write an index or document table durably; returns its sha256."""
    buffer = io.BytesIO()
    np.save(buffer, table, allow_pickle=False)
    write_durably(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def load_table(path: Path, sha256: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read what `save_table` wrote.

    Raises:
        UserError: missing, or not the file that the manifest describes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is damaged: its sha256 differs from the manifest's")
    table = _table_of(content)
    if table.dtype != dtype or table.ndim != 1:
        raise UserError(f"{path} is not a table of this format version")
    return table


def _table_of(content: bytes) -> npt.NDArray[Any]:
    """The array of a .npy file, without a copy of what may be large."""
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("a table holds no objects")
    return np.frombuffer(content, dtype=dtype, offset=file.tell()).reshape(shape)
