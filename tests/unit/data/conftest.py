"""A small corpus, its tokenizer and a data folder, shared by the tests of the data pipeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while seven tall ships drift slowly past old harbour walls".split()

NASTY = [
    "a\r\nb\rc\n\n\nd\n",
    "\tindent\n\t\tdeeper  \n   spaces   ",
    " ",
    "\n",
    "nul\0inside\0",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flags \U0001f1eb\U0001f1f7",
    "\u2581word\u2581\u2581mark\u2581",
    "\u2581",
    "<s></s><unk><pad><0x41>\u2585 \u2047 ",
    "\ufeffbyte order mark",
    "e\u0301 \u00e9 \ufb01 \u212b \uff21",
    "\u05e9\u05dc\u05d5\u05dd \u0627\u0644\u0633\u0644\u0627\u0645 \u202eright to left\u202c",
    "\u4e2d\u6587\u65e5\u672c\u8a9e\ud55c\uad6d\uc5b4",
    "\ufffd\ufffe\uffff\U0010ffff\x7f\x80\x85\u2028\u2029",
    "x" * 100_000,
    "one two " * 5_000 + "\n" + "three\n" * 5_000,
]


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct small documents of a few lines."""
    rng = random.Random(seed)
    lines = [[rng.choice(WORDS) for _ in range(rng.randint(3, 12))] for _ in range(count * 3)]
    return [f"{n}: " + "\n".join(" ".join(line) for line in lines[3 * n : 3 * n + 3]) + "\n" for n in range(count)]


@pytest.fixture(scope="session")
def nasty_texts() -> list[str]:
    return list(NASTY)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(410)


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, 400)[0]


@pytest.fixture(scope="session")
def write(tokenizer: Tokenizer) -> Callable[..., Path]:
    """write(folder, texts, seq_length=..., **options of Layout) -> folder"""

    def write_folder(folder: Path, texts: list[str], seq_length: int = 16, **options: Any) -> Path:
        documents = (Document(text, f"document {number}") for number, text in enumerate(texts))
        write_data_folder(folder, documents, tokenizer, Layout(seq_length, **options))
        return folder

    return write_folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str], write: Callable[..., Path]) -> Path:
    """Several shards, a short last member; not to be changed by a test."""
    return write(tmp_path_factory.mktemp("data") / "folder", texts, shard_bytes=5_000)
