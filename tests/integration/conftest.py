"""A small data folder and a config for it, made once for all tests of whole commands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from tests.commands import fastslow
from tests.configs import BASE

DOCUMENTS, VOCABULARY, LENGTH = 60, 320, 18


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of made-up words."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(1)
    words = ["".join(chance.choices("aeioubdfgklmnprst", k=chance.randint(2, 7))) for _ in range(150)]
    for number in range(DOCUMENTS):
        text = "\n".join(" ".join(chance.choices(words, k=9)) + "." for _ in range(12))
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def data(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as shards, by the commands a user types."""
    folder = tmp_path_factory.mktemp("data")
    inputs = str(corpus / "*.txt")
    fastslow("data", "tokenizer", "--input", inputs, "--vocab-size", str(VOCABULARY), "--output", folder / "tok")
    shards = ["--tokenizer", folder / "tok", "--seq-len", str(LENGTH), "--output", folder / "shards"]
    fastslow("data", "shard", "--input", inputs, *shards)
    return folder / "shards"


@pytest.fixture(scope="session")
def config_file(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small coupled model on that data, on one rank unless changed."""
    tree = {name: dict(section) for name, section in BASE.items()}
    tree["model"] |= {"vocab_size": VOCABULARY, "num_key_value_heads": 4}
    tree["data"] = {"path": str(data), "num_workers": 0}
    tree["train"] |= {"seq_length": LENGTH, "max_steps": 12}
    tree["checkpoint"] = {"every": 4}
    tree["monitor"] = {"log_every": 1}
    tree["validation"] = {"every": 6, "max_sequences": 16}
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
