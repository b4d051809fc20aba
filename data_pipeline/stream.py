"""Random access to the rows of one split of a data folder, each member checked as it is read."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.errors import DamagedError, UserError
from data_pipeline.folder import CacheSettings, DataFolder, Span, open_folder
from data_pipeline.index import INDEX_DTYPE, INDEX_NAME, Manifest, ShardInfo, load_table, member_name
from data_pipeline.order import WINDOW_MEMBERS
from data_pipeline.tokenizer import MODEL_NAME

_MEMBERS_KEPT = 2 * WINDOW_MEMBERS

OnError = Literal["stop", "skip"]


class TokenDataset:
    """The rows of one split. Cheap to open, safe to pickle and to fork (files are opened where they are read)."""

    def __init__(
        self, folder: DataFolder, split: str, manifest: Manifest, index: npt.NDArray[Any], on_error: OnError
    ) -> None:
        """Use `open`."""
        info = manifest.split(split, folder.path)
        self.path = folder.path
        self.location = folder.location
        self.split = split
        self.manifest = manifest
        self.tokenizer_path = folder.path / MODEL_NAME
        self.seq_length = manifest.seq_length
        self.vocab_size = manifest.vocab_size
        self.eos_id = manifest.eos_id
        self.pad_id = manifest.pad_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self.fingerprint = manifest.fingerprint
        self.num_samples = info.rows
        self.far_away = folder.far_away
        self._folder = folder
        self._shards = info.shards
        self._index = index
        self._on_error = on_error
        self._damaged: set[int] = set()
        self._skipped: list[str] = []
        self._members: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()

    @classmethod
    def open(
        cls,
        path: Path | str,
        split: str = "train",
        *,
        tokenizer_sha256: str | None = None,
        on_error: OnError = "stop",
        cache: CacheSettings | None = None,
    ) -> TokenDataset:
        """Check the manifest, the index and every local shard's existence and size; contents are checked when read.

        Args:
            path: a folder or a URL.
            tokenizer_sha256: refuse data that was encoded by another tokenizer.
            on_error: what a damaged member does: end with its name, or be replaced (see `rows`).
            cache: where the shards of a URL are kept.

        Raises:
            UserError: naming the file.
        """
        folder = open_folder(path, cache)
        manifest = Manifest.load(folder.path)
        info = manifest.split(split, folder.path)
        if tokenizer_sha256 not in (None, manifest.tokenizer_sha256):
            raise UserError(
                f"{path} was encoded by another tokenizer: sha256 {manifest.tokenizer_sha256[:12]}..., "
                f"expected {str(tokenizer_sha256)[:12]}..."
            )
        index = load_table(folder.local(f"{split}/{INDEX_NAME}", info.index_sha256), info.index_sha256, INDEX_DTYPE)
        folder.local(MODEL_NAME, manifest.tokenizer_sha256)
        if on_error == "stop":
            for number, shard in enumerate(info.shards):
                try:
                    folder.check_size(split, shard)
                except DamagedError as error:
                    raise DamagedError(f"{error} ({_lost_members(folder, split, shard, index, number)})") from None
        return cls(folder, split, manifest, index, on_error)

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """Rows by sample id -> int64 [n, seq_length + 1]. See `stored_rows`."""
        return torch.from_numpy(self.stored_rows(indices).astype(np.int64))

    def stored_rows(self, indices: Iterable[int]) -> npt.NDArray[Any]:
        """Rows by sample id, in the type in which they are stored: a quarter or half of what int64 takes.

        With `on_error="skip"` a damaged member is replaced by the next whole one, row by row, always by the same:
        positions keep their place, and `take_skipped` tells of it.

        Returns:
            [n, seq_length + 1], uint16 or uint32.

        Raises:
            UserError: a damaged or unreadable member, naming shard and member.
            IndexError: an id outside 0 .. num_samples - 1.
        """
        ids = np.fromiter(indices, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_samples:
            raise IndexError(f"sample ids must lie in 0 .. {self.num_samples - 1}")
        members, within = np.divmod(ids, self.manifest.rows_per_member)
        out = np.empty((len(ids), self.seq_length + 1), dtype=self.manifest.dtype)
        for number, (member, row) in enumerate(zip(members.tolist(), within.tolist(), strict=True)):
            block = self._member(member)
            out[number] = block[row % len(block)]  # only a replacement can be shorter than what it replaces
        return out

    def take_skipped(self) -> list[str]:
        """One line per damaged member that was met since the last call, naming shard and member."""
        lines, self._skipped = self._skipped, []
        return lines

    def prefetch(self, members: Iterable[int]) -> None:
        """Members whose rows will be asked for soon: they are brought near where they lie far away."""
        self._folder.prefetch(self.split, [self._where(member) for member in members])

    def place(self, member: int) -> str:
        """Shard and member as messages name them."""
        return f"{self.location}/{self.split}/{self._where(member)[0].name} member {member_name(member)}"

    def _where(self, member: int) -> tuple[ShardInfo, Span]:
        entry = self._index[member]
        return self._shards[int(entry["shard"])], Span(int(entry["offset"]), int(entry["size"]), int(entry["crc32"]))

    def _member(self, member: int) -> npt.NDArray[Any]:
        """[rows, seq_length + 1] of one member, or of what stands in for it, from the few that are kept."""
        rows = self._members.get(member)
        if rows is None:
            rows = self._read_member(member) if self._on_error == "stop" else self._read_whole_member(member)
            self._members[member] = rows
            if len(self._members) > _MEMBERS_KEPT:
                self._members.popitem(last=False)
        else:
            self._members.move_to_end(member)
        return rows

    def _read_whole_member(self, member: int) -> npt.NDArray[Any]:
        """The first one that is not damaged, from `member` on."""
        count = len(self._index)
        for candidate in ((member + step) % count for step in range(count)):
            if candidate in self._damaged:
                continue
            try:
                return self._read_member(candidate)
            except DamagedError as error:
                self._damaged.add(candidate)
                self._skipped.append(str(error))
        raise UserError(f"{self.location}/{self.split}: every member is damaged")

    def _read_member(self, member: int) -> npt.NDArray[Any]:
        shard, span = self._where(member)
        try:
            payload = self._folder.read(self.split, shard, span)
        except DamagedError as error:
            reason = str(error).removeprefix(f"{self.location}/{self.split}/{shard.name} ")
            raise DamagedError(f"{self.place(member)}: {reason}") from None
        if len(payload) != span.size or zlib.crc32(payload) != span.crc32:
            raise DamagedError(f"{self.place(member)} is damaged (its payload's crc32 differs)")
        return np.frombuffer(payload, dtype=self.manifest.dtype).reshape(-1, self.seq_length + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": OrderedDict()}


def _lost_members(folder: DataFolder, split: str, shard: ShardInfo, index: npt.NDArray[Any], number: int) -> str:
    """What a shard that is missing, too short or too long takes along."""
    members = np.flatnonzero(index["shard"] == number)
    path = folder.path / split / shard.name
    size = path.stat().st_size if path.is_file() else 0
    ends = index["offset"][members] + index["size"][members]
    lost = members[ends > size].tolist()
    if not lost:
        return "its members are there, its end is not" if size < shard.bytes else "more than was written"
    return f"member {member_name(lost[0])}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
