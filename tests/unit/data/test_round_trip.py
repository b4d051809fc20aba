"""Three corpora come back from the shards byte for byte: prose, code, and all that is awkward."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.demo import find_corpus
from data_pipeline.documents import iter_documents
from data_pipeline.encode import Reading
from data_pipeline.index import DOCUMENT_DTYPE, Manifest, load_table
from data_pipeline.inputs import find_files
from data_pipeline.packing import Packing
from data_pipeline.pool import Corpus
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

pytestmark = pytest.mark.unit

PACKINGS: tuple[Packing, ...] = ("concat", "best-fit")


def digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def assert_round_trip(output: Path, inputs: list[str], expected: list[bytes], tokenizer: Tokenizer) -> None:
    """Shard `inputs` in both packings: exactly the `expected` documents come back, in the recorded order."""
    corpus = Corpus(find_files(inputs), Reading())
    for packing in PACKINGS:
        folder = output / packing
        manifest = write_data_folder(folder, corpus, tokenizer, Layout(128, packing=packing))
        assert Manifest.load(folder) == manifest
        found: list[bytes] = []
        for split, info in manifest.splits.items():
            texts = [text.encode() for text in iter_documents(folder, split)]
            recorded = load_table(folder / split / "documents.npy", info.documents_sha256, DOCUMENT_DTYPE)
            assert [digest(text) for text in texts] == [row.tobytes() for row in recorded["digest"]]
            assert info.documents == len(texts)
            assert info.bytes == sum(map(len, texts))
            assert info.characters == sum(len(text.decode()) for text in texts)
            found += texts
        assert len(found) == len(expected)
        assert collections.Counter(map(digest, found)) == collections.Counter(map(digest, expected))


def test_prose(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Verses, a row each; some are equal. (The demo's test has the whole book, a document per chapter.)"""
    with find_corpus().open(encoding="utf-8") as file:
        rows = list(file)[:5000]
    expected = [json.loads(line)["text"].encode() for line in rows]
    assert len(set(expected)) < len(expected) == 5000
    (tmp_path / "verses.jsonl").write_text("".join(rows), encoding="utf-8")
    assert_round_trip(tmp_path, [str(tmp_path / "verses.jsonl")], expected, tokenizer)


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def code_corpus(files: list[Path]) -> tuple[list[Path], list[bytes]]:
    """The files that are UTF-8 and not empty, and their contents."""
    chosen, contents = [], []
    for file in files:
        content = file.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        if content:
            chosen.append(file)
            contents.append(content)
    return chosen, contents


def test_code(tmp_path: Path) -> None:
    folders = [standard_library() / name for name in ("json", "email", "asyncio")]
    _, expected = code_corpus([file for folder in folders for file in sorted(folder.rglob("*.py"))])
    assert len(expected) > 50
    tokenizer, _ = train_tokenizer((text.decode() for text in expected), 800)
    assert_round_trip(tmp_path, [f"{folder}/**/*.py" for folder in folders], expected, tokenizer)


@pytest.mark.slow
def test_the_whole_standard_library(tmp_path: Path) -> None:
    installed = standard_library() / "site-packages"
    sources = [file for file in sorted(standard_library().rglob("*.py")) if installed not in file.parents]
    files, expected = code_corpus(sources)
    assert len(expected) > 1000
    tokenizer, _ = train_tokenizer((text.decode() for text in expected[::10]), 4000)
    assert_round_trip(tmp_path, [str(file) for file in files], expected, tokenizer)


def nasty_documents(some: list[str]) -> list[str]:
    """Every character that there is, in runs of 4096, and what else has broken tokenizers and readers."""
    blocks = [
        "".join(chr(code) for code in range(start, start + 4096) if not 0xD800 <= code <= 0xDFFF)
        for start in range(0, 0x110000, 4096)
    ]
    line = "a line without an end; " * 43_479
    assert len(line) > 10**6
    endings = ["\r\n" * 500, "one\rtwo\r\nthree\n\r", "\t" * 300 + "x", " " * 5000, "\n" * 5000, "\0" * 5000, "\0"]
    marks = ["e" + "\u0301" * 400, "\u05d0\u202e\u05d1" * 300, "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 200]
    return [*filter(None, blocks), line, "y" * (10**6 + 1), *endings, *marks, "\ufeff", "\u2581" * 20_000, *some]


def test_the_nasty(tmp_path: Path, tokenizer: Tokenizer, nasty_texts: list[str]) -> None:
    expected = nasty_documents(nasty_texts)
    folder = tmp_path / "corpus"
    folder.mkdir()
    ways = [expected[number::4] for number in range(4)]
    for number, text in enumerate(ways[0]):
        (folder / f"{number}.txt").write_bytes(text.encode())
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in ways[1]]
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    rows = [json.dumps({"text": text}) for text in ways[2]]
    (folder / "rows.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress("\n".join(rows).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": ways[3]}), folder / "rows.parquet")
    assert_round_trip(tmp_path, [str(folder)], [text.encode() for text in expected], tokenizer)
