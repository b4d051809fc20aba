"""Texts with an answer that only a long memory knows: what `configs/planted.yaml` trains on.

    ..?c...............?c..............?c...........      one document: PERIODS stretches of PERIOD characters

Each stretch has a question mark at one of its first JITTER places, followed by the document's own letter, one of
LETTERS; the rest are dots. Every stretch but the first can be answered from the one before it, at least PERIOD - JITTER
characters back. A model that sees less far can do no better than guess: 1 in len(LETTERS).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.files import refuse_existing
from data_pipeline.index import Manifest
from data_pipeline.readers import Document
from data_pipeline.tokenizer import train_tokenizer

PERIOD, PERIODS, JITTER = 16, 4, 4
LETTERS = "abcdefgh"
QUESTION, FILLER = "?", "."
SEQ_LENGTH = PERIOD * PERIODS
DOCUMENTS = 8192
VOCAB_SIZE = 272
"""Bytes, control pieces, the space and the ten characters: a piece for each, none for two."""


def documents(count: int = DOCUMENTS, seed: int = 0) -> Iterator[Document]:
    """SEQ_LENGTH - 1 characters each: with its end mark a document is one sequence."""
    lot = random.Random(seed)
    for number in range(count):
        letter, text = lot.choice(LETTERS), ""
        for _ in range(PERIODS):
            before = lot.randrange(JITTER)
            text += (FILLER * before + QUESTION + letter).ljust(PERIOD, FILLER)
        yield Document(text[: SEQ_LENGTH - 1], f"planted {number}")


def build_planted(folder: Path) -> Manifest:
    """Tokenizer and shards of the planted task. Raises `UserError` where the folder exists."""
    from data_pipeline.shards import Layout, write_data_folder

    refuse_existing(folder)
    # A tokenizer that has never seen a space cannot give one back, and is refused.
    texts = (document.text + " " for document in documents())
    tokenizer, _ = train_tokenizer(texts, VOCAB_SIZE)
    return write_data_folder(folder, documents(), tokenizer, Layout(SEQ_LENGTH), build={"task": "planted"})
