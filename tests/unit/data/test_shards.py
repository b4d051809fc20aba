"""What is written: rows, splits, shards and their reproducibility, read back with other means than the writer's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_pipeline.documents import iter_documents
from data_pipeline.errors import UserError
from data_pipeline.files import building
from data_pipeline.index import DOCUMENT_DTYPE, Manifest, load_table
from data_pipeline.packing import split_and_shuffle
from data_pipeline.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

Write = Callable[..., Path]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_by_webdataset(folder: Path, split: str, seq_length: int, dtype: str = "<u2") -> np.ndarray:
    """All rows of a split through plain webdataset, without our index."""
    urls = [str(path) for path in sorted((folder / split).glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in range(len(samples))]
    payload = b"".join(sample["bin"] for sample in samples)
    return np.frombuffer(payload, dtype=dtype).reshape(-1, seq_length + 1)


def test_every_token_is_a_target_exactly_once(shared_folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = {hashlib.blake2b(text.encode(), digest_size=16).digest(): tokenizer.encode(text) for text in texts}
    manifest = Manifest.load(shared_folder)
    seen = []
    for split, info in manifest.splits.items():
        rows = rows_by_webdataset(shared_folder, split, 16)
        recorded = load_table(shared_folder / split / "documents.npy", info.documents_sha256, DOCUMENT_DTYPE)
        digests = [digest.tobytes() for digest in recorded["digest"]]
        seen += digests
        stream = [token for digest in digests for token in [*encoded[digest], tokenizer.eos_id]]
        filling = [tokenizer.pad_id] * (rows.shape[0] * 16 - len(stream))
        assert len(filling) < 16
        assert rows[:, 1:].ravel().tolist() == stream + filling
        assert rows[0, 0] == tokenizer.eos_id
        assert rows[1:, 0].tolist() == rows[:-1, -1].tolist()
        assert (info.documents, info.tokens, info.rows) == (len(digests), len(stream), rows.shape[0])
        assert len(info.shards) > (split == "train")
    assert sorted(seen) == sorted(encoded)
    assert sum(info.bytes for info in manifest.splits.values()) == sum(len(text.encode()) for text in texts)
    assert sum(info.characters for info in manifest.splits.values()) == sum(map(len, texts))


def test_nasty_documents_come_back_exactly_in_the_recorded_order(
    tmp_path: Path, write: Write, nasty_texts: list[str]
) -> None:
    folder = write(tmp_path / "data", nasty_texts, validation_fraction=0.3, shard_bytes=50_000)
    found = []
    for split, info in Manifest.load(folder).splits.items():
        documents = list(iter_documents(folder, split))
        digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in documents]
        recorded = load_table(folder / split / "documents.npy", info.documents_sha256, DOCUMENT_DTYPE)
        assert digests == [digest.tobytes() for digest in recorded["digest"]]
        found += documents
    assert sorted(found) == sorted(nasty_texts)


def test_bytes_do_not_depend_on_the_order_of_the_documents(tmp_path: Path, write: Write, texts: list[str]) -> None:
    first, second = write(tmp_path / "a", texts[:60]), write(tmp_path / "b", texts[59::-1])
    assert files_of(first) == files_of(second)


def test_the_seed_changes_the_order_but_not_the_split(tmp_path: Path, write: Write, texts: list[str]) -> None:
    first, second = (write(tmp_path / str(seed), texts[:50], seed=seed, validation_fraction=0.2) for seed in (0, 1))
    for split in ("train", "validation"):
        one, two = list(iter_documents(first, split)), list(iter_documents(second, split))
        assert one != two
        assert sorted(one) == sorted(two)


def test_members_hold_64_rows_and_shards_their_size(shared_folder: Path) -> None:
    manifest = Manifest.load(shared_folder)
    info = manifest.splits["train"]
    index = np.load(shared_folder / "train" / "index.npy")
    assert index["rows"][:-1].tolist() == [64] * (len(index) - 1)
    assert 0 < index["rows"][-1] < 64
    assert index["size"].tolist() == (index["rows"] * 17 * 2).tolist()
    assert [shard.members for shard in info.shards] == np.bincount(index["shard"]).tolist()
    for shard in info.shards:
        content = (shared_folder / "train" / shard.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.bytes, shard.sha256)


def test_token_width_follows_the_vocabulary() -> None:
    from data_pipeline.index import token_dtype

    assert [token_dtype(size).name for size in (300, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def digests_of(count: int) -> np.ndarray:
    return np.array([hashlib.blake2b(bytes([n % 256, n // 256]), digest_size=16).digest() for n in range(count)], "V16")


def test_validation_takes_the_asked_share() -> None:
    train, held_out = split_and_shuffle(digests_of(20_000), 0.05, seed=0)
    assert sorted([*train, *held_out]) == list(range(20_000))
    # binomial: 1000 expected, standard deviation 31
    assert 850 < len(held_out) < 1150
    assert not np.array_equal(train, np.sort(train))


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1.0])
def test_two_documents_give_both_splits_one(fraction: float) -> None:
    for start in range(20):
        train, held_out = split_and_shuffle(digests_of(22)[start : start + 2], fraction, seed=0)
        assert len(train) == len(held_out) == 1


def test_copies_of_a_document_stay_on_one_side() -> None:
    digests = np.repeat(digests_of(30), 3)
    train, held_out = split_and_shuffle(digests, 0.3, seed=0)
    assert not set(digests[train].tolist()) & set(digests[held_out].tolist())
    assert len(train) + len(held_out) == 90
    assert [len(part) for part in split_and_shuffle(np.repeat(digests_of(1), 5), 0.5, seed=0)] == [5, 0]


def test_no_validation_when_the_fraction_is_zero(tmp_path: Path, write: Write, texts: list[str]) -> None:
    manifest = Manifest.load(write(tmp_path / "data", texts[:20], validation_fraction=0.0))
    assert manifest.splits["train"].documents == 20
    assert (manifest.splits["validation"].rows, manifest.splits["validation"].shards) == (0, ())


def test_a_corpus_smaller_than_a_sequence_is_refused(tmp_path: Path, write: Write, tokenizer: Tokenizer) -> None:
    size = len(tokenizer.encode("the dog")) + 1
    with pytest.raises(
        UserError, match=f"smaller than one sequence: {size} tokens in the training split, --seq-len 50"
    ):
        write(tmp_path / "data", ["the dog"], seq_length=50)
    assert list(tmp_path.iterdir()) == []
    folder = write(tmp_path / "data", ["the dog"], seq_length=size)
    assert Manifest.load(folder).splits["train"].rows == 1
    with pytest.raises(UserError, match="no documents"):
        write(tmp_path / "none", [])


def test_nothing_is_left_of_a_failed_writing(tmp_path: Path, write: Write, texts: list[str]) -> None:
    with pytest.raises(UserError, match="document 5: the text holds a lone surrogate"):
        write(tmp_path / "data", [*texts[:5], "x\ud800", *texts[5:]])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(tmp_path: Path, write: Write, texts: list[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        write(tmp_path / "data", texts)
    assert files_of(tmp_path) == {"data/precious": b"x"}


def test_two_processes_cannot_build_the_same_folder(tmp_path: Path) -> None:
    with building(tmp_path / "data") as partial:
        (partial / "file").write_text("x")
        with pytest.raises(UserError, match="being written by another process"), building(tmp_path / "data"):
            pass
    assert files_of(tmp_path) == {"data/file": b"x"}


def test_only_what_is_to_be_kept_survives_a_failure(tmp_path: Path) -> None:
    for content in ({}, {"part": "x"}):
        with pytest.raises(UserError, match="stop"), building(tmp_path / "data", keep="spool") as partial:
            (partial / "spool").mkdir(exist_ok=True)
            (partial / "train").mkdir()
            for name, text in content.items():
                (partial / "spool" / name).write_text(text)
            raise UserError("stop")
        assert {path.name for path in tmp_path.rglob("*")} <= {".data.partial", ".lock", "spool", *content}
        assert (tmp_path / ".data.partial").exists() == bool(content)
    with building(tmp_path / "data", keep="spool") as partial:
        assert files_of(partial / "spool") == {"part": b"x"}


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".data.partial" / "train").mkdir(parents=True)
    (tmp_path / ".data.partial" / "train" / "old").write_text("x")
    with building(tmp_path / "data") as partial:
        (partial / "new").write_text("y")
    assert files_of(tmp_path) == {"data/new": b"y"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, write: Write, texts: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--output .*/file/data cannot be written: Not a directory"):
        write(tmp_path / "file" / "data", texts)


def test_the_manifest_is_plain_json_with_the_counts(shared_folder: Path, tokenizer: Tokenizer) -> None:
    content = json.loads((shared_folder / "manifest.json").read_text())
    assert {
        key: content[key] for key in ("format_version", "seq_length", "dtype", "vocab_size", "eos_id", "pad_id")
    } == {
        "format_version": 1,
        "seq_length": 16,
        "dtype": "uint16",
        "vocab_size": 400,
        "eos_id": 2,
        "pad_id": 3,
    }
    assert content["tokenizer_sha256"] == hashlib.sha256((shared_folder / "tokenizer.model").read_bytes()).hexdigest()
    assert (shared_folder / "tokenizer.model").read_bytes() == tokenizer.model
