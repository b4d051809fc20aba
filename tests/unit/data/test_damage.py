"""Every kind of damage is found, by the reader before a wrong token leaves it, and by verify with the member's name."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.batches import step_batches
from data_pipeline.documents import iter_documents
from data_pipeline.errors import UserError
from data_pipeline.index import Manifest
from data_pipeline.order import SampleOrder
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from data_pipeline.verify import find_damage
from tests.unit.data import damage as damages
from tests.unit.data.damage import DAMAGES, SHARD, edit, flip, member_rows, members_of, stand_in

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path, shared_folder: Path) -> Path:
    return Path(shutil.copytree(shared_folder, tmp_path / "copy"))


def damage(folder: Path) -> list[str]:
    return [line.removeprefix(f"{folder}/") for line in find_damage(folder, Manifest.load(folder))]


def read_error(folder: Path) -> str | None:
    try:
        dataset = TokenDataset.open(folder)
        dataset.rows(range(dataset.num_samples))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error).removeprefix(f"{folder}/")
    return None


def test_a_whole_folder_has_no_damage(folder: Path) -> None:
    sizes: list[int] = []
    assert list(find_damage(folder, Manifest.load(folder), sizes.append)) == []
    assert sum(sizes) == sum(path.stat().st_size for path in folder.rglob("*.tar"))
    assert read_error(folder) is None


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_no_wrong_token_leaves_the_reader(folder: Path, harm: Callable[[Path], list[int]]) -> None:
    whole = member_rows(folder)
    lost = harm(folder)
    assert any(SHARD in line and "member" in line for line in damage(folder)) or not (folder / SHARD).exists()
    try:
        dataset = TokenDataset.open(folder)
    except UserError as error:
        assert f"{SHARD} " in str(error)
        assert f"member {lost[0]:09d}.bin" in str(error)
        return
    for member, rows in enumerate(whole):
        ids = range(64 * member, 64 * member + len(rows))
        if member in lost:
            shard = "train/shard-000000.tar" if member in [n for n, _, _ in members_of(folder, 0)] else SHARD
            with pytest.raises(UserError, match=rf"{shard} member {member:09d}\.bin"):
                dataset.rows(ids)
        else:
            assert torch.equal(dataset.rows(ids), rows)


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_skipping_loses_exactly_the_damaged_members(folder: Path, harm: Callable[[Path], list[int]]) -> None:
    whole = member_rows(folder)
    lost = harm(folder)
    dataset = TokenDataset.open(folder, on_error="skip")
    told: list[str] = []
    for member in reversed(range(len(whole))):
        read = dataset.rows(range(64 * member, 64 * member + len(whole[member])))
        expected = stand_in(whole, lost, member) if member in lost else whole[member]
        assert torch.equal(read, expected)
        told += dataset.take_skipped()
    assert sorted(line.split(" member ")[1][:9] for line in told) == [f"{member:09d}" for member in lost]
    assert all(line.startswith(f"{folder}/train/shard-00000") for line in told)


def test_skipping_keeps_every_position_on_any_ranks_and_workers(folder: Path) -> None:
    def read(**options: Any) -> torch.Tensor:
        reader = step_batches(
            TokenDataset.open(folder, on_error=on_error),  # type: ignore[arg-type]
            **{"seed": 3, "start_sample": 0, "global_batch_size": 8, "dp_rank": 0, "dp_size": 1, "num_workers": 0}
            | options,
        )
        steps = -(-TokenDataset.open(folder, on_error="skip").num_samples // 8)
        return torch.stack(list(itertools.islice(reader, steps)))

    on_error, told = "stop", []
    before = read()
    (lost,) = damages.flip_payload(folder)
    on_error = "skip"
    after = read(on_skip=told.append)
    assert told == [f"{folder}/{SHARD} member {lost:09d}.bin is damaged (its payload's crc32 differs)"]
    rows = after.reshape(-1, 17) != before.reshape(-1, 17)
    order = SampleOrder(TokenDataset.open(folder).num_samples, 64, seed=3)(0, len(rows))
    assert set(np.flatnonzero(rows.any(dim=1).numpy())) == set(np.flatnonzero(order // 64 == lost)), "nothing moved"
    parts = [read(dp_rank=rank, dp_size=2, num_workers=rank) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), after)


def test_skipping_ends_where_nothing_is_left(folder: Path) -> None:
    for path in (folder / "train").glob("*.tar"):
        path.unlink()
    with pytest.raises(UserError, match="train: every member is damaged"):
        TokenDataset.open(folder, on_error="skip").rows([0])


def test_a_flipped_bit_in_a_payload(folder: Path) -> None:
    member, offset, size = members_of(folder, 1)[-1]
    flip(folder / SHARD, offset + size - 1)
    assert damage(folder) == [f"{SHARD} member {member:09d}.bin: its payload's crc32 differs"]
    assert read_error(folder) == f"{SHARD} member {member:09d}.bin is damaged (its payload's crc32 differs)"
    good = TokenDataset.open(folder)
    assert good.rows([member * 64 - 1]).shape == (1, 17), "the member before is whole"


@pytest.mark.parametrize("place", [0, 130, 265])
def test_a_flipped_bit_in_a_tar_header(folder: Path, place: int) -> None:
    """Name, size field and owner; rows are read past the header, so they stay right."""
    member, offset, _ = members_of(folder, 1)[0]
    flip(folder / SHARD, offset - 512 + place)
    assert damage(folder) == [f"{SHARD} member {member:09d}.bin: its tar header is damaged"]
    assert read_error(folder) is None


def test_a_flipped_bit_outside_the_members(folder: Path) -> None:
    edit(folder / SHARD, lambda content: content.__setitem__(len(content) - 1, 1))
    assert damage(folder) == [
        f"{SHARD}: sha256 differs from the manifest's (outside the members: padding or end of the archive)"
    ]


def test_a_shard_cut_at_a_member_boundary(folder: Path) -> None:
    (_, _, _), (member, offset, _) = members_of(folder, 1)[:2]
    size = (folder / SHARD).stat().st_size
    edit(folder / SHARD, lambda content: content[: offset - 512])
    said = f"{SHARD} has {offset - 512} bytes, the manifest says {size}"
    assert damage(folder)[:2] == [said, f"{SHARD} member {member:09d}.bin: missing"]
    assert read_error(folder) == f"{said} (member {member:09d}.bin and 1 more)"


def test_a_shard_cut_inside_a_member(folder: Path) -> None:
    member, offset, _ = members_of(folder, 1)[-1]
    edit(folder / SHARD, lambda content: content[: offset + 100])
    assert damage(folder)[1:] == [f"{SHARD} member {member:09d}.bin: cut off"]
    assert (read_error(folder) or "").startswith(f"{SHARD} has {offset + 100} bytes")


def test_a_shard_cut_while_it_is_being_read(folder: Path) -> None:
    dataset = TokenDataset.open(folder)
    member, offset, _ = members_of(folder, 1)[0]
    edit(folder / SHARD, lambda content: content[: offset + 100])
    with pytest.raises(UserError, match=rf"{SHARD} member {member:09d}\.bin is damaged"):
        dataset.rows([member * 64])
    (folder / "train" / "shard-000002.tar").unlink()
    with pytest.raises(UserError, match=r"shard-000002\.tar member \d{9}\.bin: cannot be read: No such file"):
        dataset.rows([members_of(folder, 2)[0][0] * 64])


def test_an_empty_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")
    assert len(damage(folder)) == 1 + len(members_of(folder, 1))
    assert (read_error(folder) or "").startswith(f"{SHARD} has 0 bytes")


def test_a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    assert damage(folder) == [f"{SHARD} cannot be read: No such file or directory"]
    first = members_of(folder, 1)[0][0]
    assert (
        read_error(folder) == f"{SHARD} cannot be read: No such file or directory (member {first:09d}.bin and 2 more)"
    )


def test_two_swapped_shards(folder: Path) -> None:
    one, two = folder / "train" / "shard-000000.tar", folder / SHARD
    assert one.stat().st_size == two.stat().st_size
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    named = [n for shard in (0, 1) for n, _, _ in members_of(folder, shard)]
    assert [line.split()[2] for line in damage(folder)] == [f"{n:09d}.bin:" for n in named]
    assert (read_error(folder) or "").startswith("train/shard-000000.tar member 000000000.bin is damaged")


def test_an_edited_index(folder: Path) -> None:
    path = folder / "train" / "index.npy"
    index = np.load(path)
    index["offset"][[0, 1]] = index["offset"][[1, 0]]
    np.save(path, index)
    message = "train/index.npy is damaged: its sha256 differs from the manifest's"
    assert damage(folder)[0].endswith(message)
    assert read_error(folder) == message
    path.unlink()
    assert read_error(folder) == "train/index.npy cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("key", "value"), [("pad_id", 2), ("seq_length", 8), ("dtype", "uint32"), ("vocab_size", 401), ("build", {})]
)
def test_a_manifest_edited_by_hand(folder: Path, key: str, value: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=r"manifest\.json was changed after it was written"):
        TokenDataset.open(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged: not the JSON"),
        (b"[]", "is damaged: not the JSON"),
        (b'{"format_version": 1}', "is damaged: not the fields"),
        (b'{"format_version": 1, "fingerprint": "", "splits": [], "x": 0}', "is damaged: not the fields"),
        (b'{"format_version": 9}', "has format version 9; this version reads 1"),
    ],
)
def test_a_broken_manifest(folder: Path, content: bytes, message: str) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"manifest\.json {message}"):
        TokenDataset.open(folder)


def test_a_folder_that_is_none(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        TokenDataset.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a data folder: it has no manifest\.json"):
        TokenDataset.open(tmp_path)
    with pytest.raises(UserError, match="has no split 'test'"):
        TokenDataset.open(folder, "test")


def test_an_empty_split_is_refused(tmp_path: Path, write: Callable[..., Path], texts: list[str]) -> None:
    folder = write(tmp_path / "data", texts[:10], validation_fraction=0.0)
    with pytest.raises(UserError, match="the validation split is empty"):
        TokenDataset.open(folder, "validation")
    assert damage(folder) == []


def test_another_tokenizer_is_refused(folder: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    other, _ = train_tokenizer(texts, 350)
    assert TokenDataset.open(folder, tokenizer_sha256=tokenizer.sha256).vocab_size == 400
    with pytest.raises(UserError, match="was encoded by another tokenizer"):
        TokenDataset.open(folder, tokenizer_sha256=other.sha256)
    (folder / "tokenizer.model").write_bytes(other.model)
    assert damage(folder) == ["tokenizer.model: sha256 differs from the manifest's"]
    with pytest.raises(UserError, match="was encoded by another tokenizer"):
        next(iter_documents(folder))
    (folder / "tokenizer.model").unlink()
    assert damage(folder) == ["tokenizer.model: missing"]


def test_a_shard_from_another_folder(
    tmp_path: Path, folder: Path, write: Callable[..., Path], texts: list[str]
) -> None:
    other = write(tmp_path / "other", [text[::-1] for text in texts], shard_bytes=5_000)
    shutil.copy(other / SHARD, folder / SHARD)
    assert f"{SHARD} member" in "\n".join(damage(folder))
    assert read_error(folder)


def test_a_file_that_does_not_belong(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder / "train" / "shard-000099.tar")
    assert damage(folder) == ["train/shard-000099.tar: not in the manifest"]


def test_counts_that_contradict_the_rows(folder: Path) -> None:
    """A writer's fault, not the disk's: every hash fits, the numbers do not."""
    import dataclasses

    manifest = Manifest.load(folder)
    split = dataclasses.replace(manifest.splits["train"], tokens=manifest.splits["train"].tokens + 1)
    dataclasses.replace(manifest, splits={**manifest.splits, "train": split}).save(folder)
    said = f"the manifest says {split.tokens}"
    found = split.tokens - 1
    assert damage(folder) == [
        f"train: {found} tokens found, {said}",
        f"train: {found} tokens of documents found, {said}",
    ]


def test_tables_never_unpickle(tmp_path: Path) -> None:
    from data_pipeline.index import INDEX_DTYPE, load_table, save_table

    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "x.npy").write_bytes(buffer.getvalue())
    import hashlib

    with pytest.raises((UserError, ValueError)):
        load_table(tmp_path / "x.npy", hashlib.sha256(buffer.getvalue()).hexdigest(), INDEX_DTYPE)
    sha = save_table(tmp_path / "y.npy", np.zeros(3, dtype=np.int64))
    with pytest.raises(UserError, match="not a table of this format version"):
        load_table(tmp_path / "y.npy", sha, INDEX_DTYPE)
