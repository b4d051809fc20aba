"""Writes a data folder: webdataset shards of packed rows, their index, the document table and the manifest."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from webdataset.writer import ShardWriter, TarWriter

from data_pipeline.encode import encode_items
from data_pipeline.errors import UserError
from data_pipeline.faults import FaultCounts
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
    token_dtype,
)
from data_pipeline.order import Int64s
from data_pipeline.packing import Packing, RowFormat, pack, split_and_shuffle
from data_pipeline.pool import Corpus, EncodedCorpus, encode_corpus
from data_pipeline.readers import Document
from data_pipeline.spool import Spool, skipped_lines
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer

DEFAULT_VALIDATION_FRACTION = 0.05
DEFAULT_SHARD_BYTES = 256 << 20
SKIPPED_NAME = "skipped.jsonl"
_SPOOL_NAME = "spool"
_TAR_BLOCK = 512


@dataclass(frozen=True)
class Layout:
    """What becomes of the encoded documents."""

    seq_length: int
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    seed: int = 0
    packing: Packing = "concat"
    dedup: bool = False
    shard_bytes: int = DEFAULT_SHARD_BYTES


def write_data_folder(
    folder: Path,
    source: Corpus | Iterable[Document],
    tokenizer: Tokenizer,
    layout: Layout,
    *,
    workers: int = 1,
    replace: bool = False,
    build: dict[str, Any] | None = None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    on_kept: Callable[[int], None] = lambda num_bytes: None,
    say: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Encode, split, shuffle, pack and write.

    The same documents give the same bytes, whatever their order, the number of workers (for a `Corpus`; other
    documents are encoded here) and how often the writing was interrupted. The folder appears under its name only when
    it is complete. It needs room for the tokens twice while it is built. `build` is kept in the manifest next to the
    layout. `say` is told what the user should know, a line at a time.

    Raises:
        UserError: the folder exists (unless `replace`), a bad document, or fewer training tokens than one sequence.
    """
    keep = _SPOOL_NAME if isinstance(source, Corpus) else ""
    with building(folder, replace=replace, keep=keep) as partial:
        spool_folder = partial / _SPOOL_NAME
        spool_folder.mkdir(exist_ok=True)
        if isinstance(source, Corpus):
            encoded = encode_corpus(source, tokenizer, spool_folder, workers, on_bytes, on_kept, say)
        else:
            encoded = EncodedCorpus(["all"], [encode_items(_told(source, on_bytes), "all", tokenizer, spool_folder)])
        with closing(Spool(spool_folder, encoded.keys, token_dtype(tokenizer.vocab_size))) as spool:
            try:
                splits, num_copies = _write_splits(partial, spool, tokenizer, layout)
            except UserError:
                shutil.rmtree(spool_folder)  # there is nothing in it that another layout could use
                raise
        faults = _report(encoded, num_copies, layout, say)
        if faults.counts:
            with (partial / SKIPPED_NAME).open("wb") as file:
                file.writelines(skipped_lines(spool_folder, encoded.keys))
            say(f"all of them are listed in {folder / SKIPPED_NAME}")
        shutil.rmtree(spool_folder)
        write_durably(partial / MODEL_NAME, tokenizer.model)
        manifest = Manifest(
            seq_length=layout.seq_length,
            dtype=token_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            tokenizer_sha256=tokenizer.sha256,
            rows_per_member=ROWS_PER_MEMBER,
            build={
                "validation_fraction": layout.validation_fraction,
                "seed": layout.seed,
                "packing": layout.packing,
                "duplicates_removed": num_copies,
                "skipped": dict(sorted(faults.counts.items())),
                **(build or {}),
            },
            splits=splits,
        )
        manifest.save(partial)
    return manifest


def _told(documents: Iterable[Document], on_bytes: Callable[[int], None]) -> Iterator[Document]:
    for document in documents:
        yield document
        on_bytes(len(document.text))


def _report(encoded: EncodedCorpus, num_copies: int, layout: Layout, say: Callable[[str], None]) -> FaultCounts:
    faults = FaultCounts()
    for summary in encoded.summaries:
        faults.merge(summary.faults)
    for line in faults.lines():
        say(line)
    if with_nul := sum(summary.with_nul for summary in encoded.summaries):
        say(f"{with_nul} documents hold NUL characters, which are kept as they are")
    if layout.dedup:
        say(f"removed {num_copies} copies of documents that occur more than once")
    return faults


def _write_splits(
    partial: Path, spool: Spool, tokenizer: Tokenizer, layout: Layout
) -> tuple[dict[str, SplitInfo], int]:
    """Returns the splits, and the number of copies that were left out."""
    if not len(spool.documents):
        raise UserError("the corpus holds no documents")
    digests = spool.documents["digest"]
    chosen = split_and_shuffle(digests, layout.validation_fraction, layout.seed, dedup=layout.dedup)
    train_tokens = _num_tokens(spool, chosen[0])
    if train_tokens < layout.seq_length:
        counts = f"{train_tokens} tokens in the training split, --seq-len {layout.seq_length}"
        raise UserError(f"the corpus is smaller than one sequence: {counts}")
    splits = {
        name: _write_split(partial / name, spool, documents, tokenizer, layout)
        for name, documents in zip(SPLITS, chosen, strict=True)
    }
    return splits, len(digests) - sum(map(len, chosen))


def _num_tokens(spool: Spool, indices: Int64s) -> int:
    """Tokens of some documents, their end marks included."""
    return int(spool.documents["tokens"][indices].sum()) + len(indices)


def _write_split(folder: Path, spool: Spool, documents: Int64s, tokenizer: Tokenizer, layout: Layout) -> SplitInfo:
    folder.mkdir()
    rows = RowFormat(layout.seq_length, tokenizer.eos_id, tokenizer.pad_id, ROWS_PER_MEMBER)
    order, blocks = pack(spool, documents, layout.packing, rows)
    index, shards = _write_shards(folder, blocks, layout.shard_bytes)
    table = np.empty(len(order), dtype=DOCUMENT_DTYPE)
    for name in ("digest", "tokens"):
        table[name] = spool.documents[name][order]
    return SplitInfo(
        documents=len(order),
        tokens=_num_tokens(spool, order),
        bytes=int(spool.documents["bytes"][order].sum()),
        characters=int(spool.documents["characters"][order].sum()),
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
