"""Reads every byte of a data folder and names what is damaged."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DamagedError, UserError
from data_pipeline.files import sha256_of
from data_pipeline.folder import DataFolder, LocalFolder
from data_pipeline.index import (
    DOCUMENT_DTYPE,
    DOCUMENTS_NAME,
    INDEX_DTYPE,
    INDEX_NAME,
    Manifest,
    ShardInfo,
    load_table,
    member_name,
)
from data_pipeline.tokenizer import MODEL_NAME

_HEADER_BYTES = 512


def find_damage(
    folder: DataFolder | Path, manifest: Manifest, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[str]:
    """Yield one line per damaged file or member. `on_bytes` is told the size of each shard when it has been read."""
    if isinstance(folder, Path):
        folder = LocalFolder(folder)
    yield from _damage_of_tokenizer(folder, manifest)
    for split in manifest.splits:
        yield from _damage_of_split(folder, split, manifest, on_bytes)


def _damage_of_tokenizer(folder: DataFolder, manifest: Manifest) -> Iterator[str]:
    try:
        model = folder.local(MODEL_NAME, manifest.tokenizer_sha256)
    except DamagedError as error:
        yield str(error)
        return
    if not model.is_file():
        yield f"{model}: missing"
    elif sha256_of(model) != manifest.tokenizer_sha256:
        yield f"{model}: sha256 differs from the manifest's"


def _damage_of_split(
    folder: DataFolder, split: str, manifest: Manifest, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    info = manifest.splits[split]
    place = f"{folder.location}/{split}"
    if not folder.far_away:
        strangers = _strangers(folder.path / split, {shard.name for shard in info.shards})
        yield from (f"{path}: not in the manifest" for path in strangers)
    try:
        index_path = folder.local(f"{split}/{INDEX_NAME}", info.index_sha256)
        index = load_table(index_path, info.index_sha256, INDEX_DTYPE)
        documents_path = folder.local(f"{split}/{DOCUMENTS_NAME}", info.documents_sha256)
        documents = load_table(documents_path, info.documents_sha256, DOCUMENT_DTYPE)
    except UserError as error:
        yield str(error)
        return
    whole = True
    counts = np.zeros(2, dtype=np.int64)
    for number, shard in enumerate(info.shards):
        for line in _damage_of_shard(folder, split, shard, index, number, manifest, counts):
            whole = False
            yield line
        on_bytes(shard.bytes)
    if whole:
        said = {
            "tokens": (int(counts[0]), info.tokens),
            "end-of-document ids": (int(counts[1]), info.documents),
            "documents": (len(documents), info.documents),
            "tokens of documents": (int(documents["tokens"].sum()) + len(documents), info.tokens),
            "rows": (int(index["rows"].sum()), info.rows),
        }
        for what, (found, expected) in said.items():
            if found != expected:
                yield f"{place}: {found} {what} found, the manifest says {expected}"


def _strangers(folder: Path, known: set[str]) -> list[Path]:
    """Files that no reader would look at: a sign that folders were mixed."""
    names = known | {INDEX_NAME, DOCUMENTS_NAME}
    return sorted(path for path in folder.iterdir() if path.name not in names) if folder.is_dir() else []


def _damage_of_shard(
    folder: DataFolder,
    split: str,
    shard: ShardInfo,
    index: npt.NDArray[Any],
    number: int,
    manifest: Manifest,
    counts: npt.NDArray[np.int64],
) -> Iterator[str]:
    """Check a shard and each of its members; add its targets and end-of-document ids to `counts`."""
    place = f"{folder.location}/{split}/{shard.name}"
    try:
        file = os.fdopen(folder.open_shard(split, shard), "rb")
    except DamagedError as error:
        yield str(error)
        return
    named = 0
    digest = hashlib.sha256()
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.bytes:
            yield f"{place} has {size} bytes, the manifest says {shard.bytes}"
        for member in np.flatnonzero(index["shard"] == number).tolist():
            entry = index[member]
            skipped = file.read(max(0, int(entry["offset"]) - _HEADER_BYTES - file.tell()))
            header, payload = file.read(_HEADER_BYTES), file.read(int(entry["size"]))
            for part in (skipped, header, payload):
                digest.update(part)
            if len(payload) < int(entry["size"]):
                fault = "cut off" if payload else "missing"
            elif zlib.crc32(payload) != int(entry["crc32"]):
                fault = "its payload's crc32 differs"
            elif not _is_header_of(header, member, len(payload)):
                fault = "its tar header is damaged"
            else:
                targets = np.frombuffer(payload, dtype=manifest.dtype).reshape(int(entry["rows"]), -1)[:, 1:]
                counts += np.count_nonzero(targets != manifest.pad_id), np.count_nonzero(targets == manifest.eos_id)
                continue
            named += 1
            yield f"{place} member {member_name(member)}: {fault}"
        while rest := file.read(1 << 20):
            digest.update(rest)
    if not named and digest.hexdigest() != shard.sha256:
        yield f"{place}: sha256 differs from the manifest's (outside the members: padding or end of the archive)"


def _is_header_of(header: bytes, member: int, size: int) -> bool:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        return False
    return info.name == member_name(member) and info.size == size and info.isreg()
