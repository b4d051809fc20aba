"""Ways to damage a copy of the shared data folder, each with the training members that are lost by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from data_pipeline.stream import TokenDataset

SHARD = "train/shard-000001.tar"


def edit(path: Path, change: Callable[[bytearray], bytes | bytearray | None]) -> None:
    content = bytearray(path.read_bytes())
    changed = change(content)
    path.write_bytes(content if changed is None else changed)


def flip(path: Path, offset: int) -> None:
    edit(path, lambda content: content.__setitem__(offset, content[offset] ^ 0x10))


def members_of(folder: Path, shard: int) -> list[tuple[int, int, int]]:
    """(member, payload offset, size) of a shard's members."""
    index = np.load(folder / "train" / "index.npy")
    return [(n, int(entry["offset"]), int(entry["size"])) for n, entry in enumerate(index) if entry["shard"] == shard]


def numbers_of(folder: Path, *shards: int) -> list[int]:
    return [member for shard in shards for member, _, _ in members_of(folder, shard)]


def flip_payload(folder: Path) -> list[int]:
    member, offset, size = members_of(folder, 1)[-1]
    flip(folder / SHARD, offset + size - 1)
    return [member]


def flip_header(folder: Path) -> list[int]:
    """Rows are read past the header, so that they stay right: `verify` names the member."""
    flip(folder / SHARD, members_of(folder, 1)[0][1] - 512 + 130)
    return []


def cut_at_a_member_boundary(folder: Path) -> list[int]:
    offset = members_of(folder, 1)[1][1]
    edit(folder / SHARD, lambda content: content[: offset - 512])
    return numbers_of(folder, 1)[1:]


def cut_inside_a_member(folder: Path) -> list[int]:
    member, offset, _ = members_of(folder, 1)[-1]
    edit(folder / SHARD, lambda content: content[: offset + 100])
    return [member]


def empty_shard(folder: Path) -> list[int]:
    (folder / SHARD).write_bytes(b"")
    return numbers_of(folder, 1)


def missing_shard(folder: Path) -> list[int]:
    (folder / SHARD).unlink()
    return numbers_of(folder, 1)


def swapped_shards(folder: Path) -> list[int]:
    one, two = folder / "train" / "shard-000000.tar", folder / SHARD
    assert one.stat().st_size == two.stat().st_size
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    return numbers_of(folder, 0, 1)


def shard_from_another_tokenizer(folder: Path) -> list[int]:
    """Same shape, same size, other ids."""
    for _, offset, size in members_of(folder, 1):
        ids = np.frombuffer((folder / SHARD).read_bytes()[offset : offset + size], dtype="<u2")
        other = ((ids + 7) % 400).astype("<u2").tobytes()
        edit(folder / SHARD, lambda content: content[:offset] + other + content[offset + size :])  # noqa: B023
    return numbers_of(folder, 1)


DAMAGES: Sequence[Callable[[Path], list[int]]] = (
    flip_payload,
    flip_header,
    cut_at_a_member_boundary,
    cut_inside_a_member,
    empty_shard,
    missing_shard,
    swapped_shards,
    shard_from_another_tokenizer,
)


def member_rows(folder: Path) -> list[torch.Tensor]:
    """The rows of each training member, as they were written."""
    dataset = TokenDataset.open(folder)
    n, size = dataset.num_samples, dataset.manifest.rows_per_member
    return [dataset.rows(range(first, min(first + size, n))) for first in range(0, n, size)]


def stand_in(whole: list[torch.Tensor], lost: list[int], member: int) -> torch.Tensor:
    """What is read in place of a lost member: the next whole one, from its top again where it is shorter."""
    other = next(n % len(whole) for n in range(member, member + len(whole)) if n % len(whole) not in lost)
    rows = [whole[other][row % len(whole[other])] for row in range(len(whole[member]))]
    return torch.stack(rows)
