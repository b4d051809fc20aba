"""Splits, copies, and rows of both packings, against plain loops over items."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.best_fit import fill_bins
from data_pipeline.cutting import LONGEST_PIECE, PIECE_CHARACTERS, Cutter, pieces
from data_pipeline.documents import iter_documents
from data_pipeline.index import DOCUMENT_DTYPE, Manifest, load_table
from data_pipeline.packing import split_and_shuffle
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

pytestmark = pytest.mark.unit

Write = Callable[..., Path]


def bins_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as it is defined; the sums of the bins."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(capacity - room for room in rooms)


@pytest.mark.parametrize("seed", range(30))
def test_bins_are_those_of_best_fit_decreasing(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 7, 10, 64, 100])
    lengths = [rng.randint(0, capacity - (seed % 2)) for _ in range(rng.choice([0, 1, 5, 300]))]
    if seed % 3 == 0:
        lengths = [max(0, min(length, capacity // 4 + 1)) for length in lengths]
    bins = fill_bins(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(bins.items.tolist()) == [item for item, length in enumerate(lengths) if length]
    contents = [bins.items[first:last].tolist() for first, last in zip(bins.starts[:-1], bins.starts[1:], strict=True)]
    assert all(content == sorted(content) for content in contents)
    assert [content[0] for content in contents] == sorted(content[0] for content in contents)
    sums = sorted(sum(lengths[item] for item in content) for content in contents)
    assert sums == bins_one_by_one([length for length in lengths if length], capacity)


def test_a_million_items_are_packed_at_once() -> None:
    """Item by item this takes hours; nearly no room is left over."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(np.int64) % 2048
    bins = fill_bins(lengths, 2048)
    fullest = -(-int(lengths.sum()) // 2048)
    assert fullest <= len(bins.starts) - 1 <= fullest * 1.001


def plain_best_fit_rows(documents: list[list[int]], length: int, eos: int, pad: int) -> list[list[int]]:
    """Rows as the format is described, from documents in their recorded order."""
    wholes, rests = [], []
    for ids in documents:
        stream = [*ids, eos]
        whole = len(stream) // length * length
        before = [eos, *stream]
        wholes += [before[start : start + length + 1] for start in range(0, whole, length)]
        if rest := stream[whole:]:
            rests.append((before[whole], rest))
    rows, room = [], 0
    for context, rest in rests:
        if len(rest) > room or not rows:
            rows.append([context])
            room = length
        rows[-1] += rest
        room = length - len(rows[-1]) + 1
    return wholes + [row + [pad] * (length + 1 - len(row)) for row in rows]


def test_best_fit_rows_hold_whole_documents(
    tmp_path: Path, write: Write, tokenizer: Tokenizer, texts: list[str]
) -> None:
    # longer than a row, exactly one row, two rows
    exact = next(text for n in range(1, 999) if len(tokenizer.encode(text := "a fox " * n)) == 63)
    chosen = [*texts[:150], "".join(texts[150:170]), exact, "z" * 1000]
    folder = write(tmp_path / "data", chosen, seq_length=64, packing="best-fit", validation_fraction=0.2)
    manifest = Manifest.load(folder)
    assert manifest.build["packing"] == "best-fit"
    found = []
    for split, info in manifest.splits.items():
        recorded = load_table(folder / split / "documents.npy", info.documents_sha256, DOCUMENT_DTYPE)
        texts_of = {hashlib.blake2b(text.encode(), digest_size=16).digest(): text for text in chosen}
        order = [texts_of[digest.tobytes()] for digest in recorded["digest"]]
        found += order
        encoded = [tokenizer.encode(text) for text in order]
        dataset = TokenDataset.open(folder, split)
        rows = dataset.rows(range(dataset.num_samples)).tolist()
        targets = [token for row in rows for token in row[1:] if token != tokenizer.pad_id]
        assert len(targets) == info.tokens == sum(len(ids) + 1 for ids in encoded)
        if split == "train":
            whole_rows = sum((len(ids) + 1) // 64 for ids in encoded)
            assert whole_rows > 4
            expected = plain_best_fit_rows(encoded, 64, tokenizer.eos_id, tokenizer.pad_id)
            # the plain rows are filled first-come, so a rest may have moved into the row before
            assert rows[:whole_rows] == expected[:whole_rows]
            assert targets == [token for row in expected for token in row[1:] if token != tokenizer.pad_id]
            assert len(rows) <= len(expected)
            assert {row[0] for row in rows[whole_rows:]} != {tokenizer.eos_id}, "rests keep their context"
        assert list(iter_documents(folder, split)) == order
        for row in rows:
            padding = row.index(tokenizer.pad_id) if tokenizer.pad_id in row else len(row)
            assert set(row[padding:]) <= {tokenizer.pad_id}
            assert padding == len(row) or row[padding - 1] == tokenizer.eos_id
    assert sorted(found) == sorted(chosen)


def test_best_fit_cuts_no_document_that_fits_and_concatenation_does(
    tmp_path: Path, write: Write, tokenizer: Tokenizer, texts: list[str]
) -> None:
    for packing, uncut in (("best-fit", True), ("concat", False)):
        folder = write(tmp_path / packing, texts[:100], 256, packing=packing, validation_fraction=0.0)
        dataset = TokenDataset.open(folder)
        starts = dataset.rows(range(dataset.num_samples))[:, 0].tolist()
        assert (set(starts) == {tokenizer.eos_id}) == uncut


def test_copies_are_removed_and_counted(tmp_path: Path, write: Write, texts: list[str]) -> None:
    many = [*texts[:30], *texts[:10], *texts[:10]]
    folder = write(tmp_path / "data", many, dedup=True, validation_fraction=0.3)
    manifest = Manifest.load(folder)
    assert manifest.build["duplicates_removed"] == 20
    found = [text for split in manifest.splits for text in iter_documents(folder, split)]
    assert sorted(found) == sorted(texts[:30])
    once = write(tmp_path / "once", texts[:30], validation_fraction=0.3)
    for split in ("train", "validation"):
        assert (once / split / "shard-000000.tar").read_bytes() == (folder / split / "shard-000000.tar").read_bytes()
    assert Manifest.load(write(tmp_path / "all", many)).build["duplicates_removed"] == 0


def test_digests_that_share_a_half_are_no_copies() -> None:
    words = np.array([[1, 7], [2, 7], [1, 8], [1, 7]], dtype="<u8")
    digests = np.frombuffer(words.tobytes(), dtype="V16")
    train, _ = split_and_shuffle(digests, 0.0, seed=3, dedup=True)
    assert sorted(words[train].tolist()) == [[1, 7], [1, 8], [2, 7]]


LONG_TEXTS = {
    "newlines": "seven tall ships\n" * 9000,
    "spaces": "seven tall ships  drift " * 30_000,
    "nothing": "x" * 400_000,
    "mixed": "x" * 200_000 + " y" * 40_000 + "\n" * 40_000 + "z" * 70_000 + "\n end",
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_pieces_do_not_depend_on_the_stretches(name: str) -> None:
    text = LONG_TEXTS[name]
    expected = list(pieces(text))
    assert "".join(expected) == text
    assert len(expected) > 1
    assert max(map(len, expected)) <= LONGEST_PIECE
    for size in (1000, PIECE_CHARACTERS, LONGEST_PIECE - 1, LONGEST_PIECE + 1, len(text) - 1):
        cutter = Cutter()
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        found = [piece for n, part in enumerate(parts) for piece in cutter.feed(part, is_last=n == len(parts) - 1)]
        assert found == expected


@pytest.mark.parametrize("model", ["bpe", "unigram"])
@pytest.mark.parametrize("name", ["newlines", "spaces"])
def test_cuts_change_no_id(model: str, name: str, texts: list[str]) -> None:
    import sentencepiece

    trained, _ = train_tokenizer(texts, 350, model)  # type: ignore[arg-type]
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained.model)
    assert len(list(pieces(LONG_TEXTS[name]))) > 2
    assert trained.encode(LONG_TEXTS[name]) == oracle.encode(LONG_TEXTS[name])
