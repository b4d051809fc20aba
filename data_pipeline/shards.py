"""Writes a data folder: webdataset shards of packed rows, their index, the document table and the manifest."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from webdataset.writer import ShardWriter, TarWriter

from data_pipeline.encode import Spool, encode_documents
from data_pipeline.errors import UserError
from data_pipeline.files import building, fsync_path, sha256_of, write_durably
from data_pipeline.index import (
    DOCUMENT_DTYPE,
    DOCUMENTS_NAME,
    INDEX_DTYPE,
    INDEX_NAME,
    ROWS_PER_MEMBER,
    SPLITS,
    Manifest,
    ShardInfo,
    SplitInfo,
    member_key,
    save_table,
)
from data_pipeline.inputs import Document
from data_pipeline.order import Int64s
from data_pipeline.packing import pack_rows, split_and_shuffle
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer

DEFAULT_VALIDATION_FRACTION = 0.05
DEFAULT_SHARD_BYTES = 256 << 20
_TAR_BLOCK = 512


def write_data_folder(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    seq_length: int,
    *,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    seed: int = 0,
    workers: int = 1,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    build: dict[str, Any] | None = None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Manifest:
    """Encode, split, shuffle, pack and write.

    The same documents give the same bytes, whatever their order and the number of workers.
    The folder appears under its name only when it is complete. It needs room for the tokens twice while it is built.
    `build` is kept in the manifest next to seed and fraction.

    Raises:
        UserError: the folder exists (unless `replace`), a bad document, or fewer training tokens than one sequence.
    """
    with building(folder, replace=replace) as partial:
        spool_path = partial / "spool.bin"
        spool = encode_documents(documents, tokenizer, spool_path, workers, on_bytes)
        if not len(spool.documents):
            raise UserError("the corpus holds no documents")
        chosen = dict(zip(SPLITS, split_and_shuffle(spool.documents["digest"], validation_fraction, seed), strict=True))
        train_tokens = _num_tokens(spool, chosen["train"])
        if train_tokens < seq_length:
            counts = f"{train_tokens} tokens in the training split, --seq-len {seq_length}"
            raise UserError(f"the corpus is smaller than one sequence: {counts}")
        splits = {
            name: _write_split(partial / name, spool, indices, seq_length, tokenizer, shard_bytes)
            for name, indices in chosen.items()
        }
        spool_path.unlink()
        write_durably(partial / MODEL_NAME, tokenizer.model)
        manifest = Manifest(
            seq_length=seq_length,
            dtype=spool.dtype.name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            tokenizer_sha256=tokenizer.sha256,
            rows_per_member=ROWS_PER_MEMBER,
            build={"validation_fraction": validation_fraction, "seed": seed, **(build or {})},
            splits=splits,
        )
        manifest.save(partial)
    return manifest


def _num_tokens(spool: Spool, indices: Int64s) -> int:
    """Tokens of some documents, their end marks included."""
    return int(spool.documents["tokens"][indices].sum()) + len(indices)


def _write_split(
    folder: Path, spool: Spool, indices: Int64s, seq_length: int, tokenizer: Tokenizer, shard_bytes: int
) -> SplitInfo:
    folder.mkdir()
    blocks = pack_rows(spool, indices, seq_length, tokenizer.eos_id, tokenizer.pad_id, ROWS_PER_MEMBER)
    index, shards = _write_shards(folder, blocks, shard_bytes)
    documents = spool.documents[indices]
    table = np.empty(len(documents), dtype=DOCUMENT_DTYPE)
    table["digest"], table["tokens"] = documents["digest"], documents["tokens"]
    return SplitInfo(
        documents=len(documents),
        tokens=_num_tokens(spool, indices),
        bytes=int(documents["bytes"].sum()),
        characters=int(documents["characters"].sum()),
        rows=int(index["rows"].sum()),
        index_sha256=save_table(folder / INDEX_NAME, index),
        documents_sha256=save_table(folder / DOCUMENTS_NAME, table),
        shards=shards,
    )


def _write_shards(
    folder: Path, blocks: Iterator[npt.NDArray[Any]], shard_bytes: int
) -> tuple[npt.NDArray[Any], tuple[ShardInfo, ...]]:
    """One member per block of rows; a new shard once `shard_bytes` of payload are in the current one."""
    records: list[tuple[int, int, int, int, int]] = []
    files: list[BinaryIO] = []

    def open_shard(name: str) -> BinaryIO:
        files.append((folder / name).open("wb"))
        return files[-1]

    def close_shard(name: str) -> None:
        files[-1].close()
        fsync_path(folder / name)

    first = next(blocks, None)
    if first is not None:
        # mtime fixed, uid and gid 0 by default: the shard's bytes depend on its rows alone
        with ShardWriter(
            "shard-%06d.tar",
            maxcount=1 << 62,
            maxsize=shard_bytes,
            verbose=0,
            opener=open_shard,
            post=close_shard,
            mtime=0,
        ) as writer:
            block: npt.NDArray[Any] | None = first
            while block is not None:
                payload = block.tobytes()
                writer.write({"__key__": member_key(len(records)), "bin": payload})
                offset = _end_of_shard(writer) - _padded(len(payload))
                records.append((len(files) - 1, len(block), offset, len(payload), zlib.crc32(payload)))
                block = next(blocks, None)
    index = np.array(records, dtype=INDEX_DTYPE)
    members = np.bincount(index["shard"], minlength=len(files)).tolist()
    paths = [Path(file.name) for file in files]
    shards = tuple(
        ShardInfo(path.name, path.stat().st_size, sha256_of(path), count)
        for path, count in zip(paths, members, strict=True)
    )
    return index, shards


def _end_of_shard(writer: ShardWriter) -> int:
    """Bytes of the current shard so far."""
    tar = writer.tarstream
    assert isinstance(tar, TarWriter)
    return int(tar.tarstream.offset)


def _padded(size: int) -> int:
    return -(-size // _TAR_BLOCK) * _TAR_BLOCK
